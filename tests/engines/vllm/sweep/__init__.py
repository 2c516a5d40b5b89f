"""Every architecture of vLLM's registry that transformers can instantiate, and every quantization and topology worth a case:
`python -m tests.engines.vllm.sweep` (from the root of the repository) probes them all and writes `docs/coverage.md`."""
