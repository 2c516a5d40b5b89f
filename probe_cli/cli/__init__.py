"""The command line: one command per file, none with logic of its own."""
