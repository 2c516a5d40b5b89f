#!/usr/bin/env python3
"""Write a small, real checkpoint in Hugging Face layout: config.json, safetensors shards, their index.

    python examples/make_checkpoint.py checkpoint/ --preset qwen3-moe --seed 1
"""

from __future__ import annotations

import argparse

from probe_cli.engines.embedded.checkpoints import PRESETS, preset, write_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small checkpoint in Hugging Face layout.")
    parser.add_argument("directory")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-moe")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other values in every tensor")
    parser.add_argument("--shards", type=int, default=2)
    options = parser.parse_args()
    config = preset(options.preset, num_hidden_layers=options.layers)
    folder = write_checkpoint(options.directory, config, seed=options.seed, shards=options.shards)
    files = sorted(folder.glob("*.safetensors"))
    print(f"{folder}: {options.preset}, {len(files)} files, {sum(file.stat().st_size for file in files):,} bytes")


if __name__ == "__main__":
    main()
