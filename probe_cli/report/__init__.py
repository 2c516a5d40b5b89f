"""What people and programs get to see: text, tables, JSON, progress. No torch, no engine."""
