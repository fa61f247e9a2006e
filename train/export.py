"""How does a trained model leave its run? Weights, tokenizer, chat template, a model card, and how to serve it.

What a run folder holds is merged already (`lora.full_state_dict`), so an export is the same for adapters and for full
training.
"""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from data.tool_formats.detect import detect_tool_format
from train.metrics import read_metrics
from train.model import DTYPES, check_model_folder, load_tokenizer

_PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3_json": "llama3_json",
    "pythonic": "pythonic",
    "mistral": "mistral",
    "glm": "glm45",
    "gemma": "gemma4",
    "harmony": "openai",
}
"""vLLM's name of the parser that reads a tool format; those that it has none for are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Where the weights came from, where they are now, and the command that serves them."""

    source: Path
    folder: Path
    serve: str


def export_model(run: Path, folder: Path, *, dtype: str) -> Exported:
    """Write a model of a run into `folder`, in one move.

    Args:
        run: a run folder: of its `best`, `final` and newest checkpoint the first that is there; or one of these.
        dtype: what the weights are stored in; "bfloat16" is what servers compute in.

    Raises:
        ValueError: there is no model in the run, or `folder` is there already.
    """
    source = _model_of(run)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already; delete it, or name another folder")
    check_model_folder(str(source))
    tokenizer: Any = load_tokenizer(str(source))
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype])
    config = _config_of(source)
    serve = serve_command(folder, tokenizer, config, dtype=dtype)
    temporary = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "README.md").write_text(_card(source, model, config, serve, dtype=dtype), encoding="utf-8")
    if folder.exists():
        folder.rmdir()
    temporary.rename(folder)
    return Exported(source=source, folder=folder, serve=serve)


def serve_command(folder: Path, tokenizer: Any, config: Mapping[str, Any], *, dtype: str) -> str:
    """`vllm serve …`, with the context that the run had, and with the parser that reads the model's tool calls where
    vLLM has one."""
    words = ["vllm", "serve", str(folder), "--dtype", dtype]
    context = config.get("rollout", {}).get("engine", {}).get("max_context_tokens")
    if context is not None:
        words += ["--max-model-len", str(context)]
    parser = _tool_parser(tokenizer, config)
    if parser is not None:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
    return shlex.join(words)


def _tool_parser(tokenizer: Any, config: Mapping[str, Any]) -> str | None:
    named = config.get("rollout", {}).get("renderer", {}).get("tool_format", "auto")
    template = tokenizer.chat_template
    if named == "auto" and isinstance(template, str):
        named = detect_tool_format(template, tokenizer.get_added_vocab()).name
    return _PARSERS.get(named)


def _model_of(run: Path) -> Path:
    if (run / "config.json").is_file():
        return run
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    for place in (run / "best", run / "final", *checkpoints[-1:]):
        if (place / "config.json").is_file():
            return place
    raise ValueError(f"{run}: no model in it (best, final or checkpoints/step-N); is it the folder of a run?")


def _config_of(source: Path) -> dict[str, Any]:
    """The resolved configuration of the run that made a model; empty where there is none."""
    for folder in source.resolve().parents[:2]:
        if (folder / "config.toml").is_file():
            return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    return {}


def _card(source: Path, model: Any, config: Mapping[str, Any], serve: str, *, dtype: str) -> str:
    """What it is, where it comes from, how good it was, how it is served. Figures are the run's own records."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [tool-use, agentgrad]",
        "---",
        f"# {source.resolve().parent.name}",
        "",
        f"{type(model).__name__}, {parameters:,} parameters, {dtype}, trained to use tools with agentgrad.",
        "",
        "| | |",
        "|---|---|",
        f"| weights | `{source.name}` of the run |",
    ]
    if config:
        env = config.get("rollout", {}).get("env", {}).get("name")
        rows = {"started from": config.get("model"), "environment": env, "seed": config.get("seed")}
        lines += [f"| {name} | `{value}` |" for name, value in rows.items() if value is not None]
    lines += [f"| {name} | {value} |" for name, value in _figures(source).items()]
    lines += ["", "```bash", serve, "```", ""]
    return "\n".join(lines)


def _figures(source: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    held_out = source / "held_out.json"
    if held_out.is_file():
        best = json.loads(held_out.read_text())
        found["step"] = str(best["step"])
        found["held-out success"] = f"{100 * best['success']:.1f} %"
    metrics = source.resolve().parent / "metrics.jsonl"
    if not found and metrics.is_file() and (rows := read_metrics(metrics)):
        found["step"] = str(rows[-1]["step"])
        evaluated = [row for row in rows if row.get("eval/success") is not None]
        if evaluated and evaluated[-1]["step"] == rows[-1]["step"]:
            found["held-out success"] = f"{100 * evaluated[-1]['eval/success']:.1f} %"
    return found
