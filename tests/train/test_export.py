"""An exported model scores as the run's, and its folder says what it is and how it is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.train.tiny import load_embedded_tokenizer, make_model, save_model
from train.checkpoint import save_best, save_final
from train.config import LoraSettings
from train.export import export_model
from train.lora import add_lora

IDS = torch.tensor([[5, 9, 40, 70, 11, 30]])
CONFIG = """
model = "runs/sft/final"
seed = 3
[rollout.env]
name = "lookup_calc"
[rollout.engine]
max_context_tokens = 640
"""


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "grpo"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    tokenizer = load_embedded_tokenizer()
    save_final(folder, model=make_model(len(tokenizer), seed=1), tokenizer=tokenizer)
    save_best(folder, 7, 0.625, model=make_model(len(tokenizer), seed=2), tokenizer=tokenizer)
    return folder


def test_the_best_weights_go_out_with_card_template_and_command(run: Path, tmp_path: Path) -> None:
    done = export_model(run, tmp_path / "out", dtype="float32")
    assert done.source == run / "best"
    torch.testing.assert_close(logits(tmp_path / "out"), logits(run / "best"), rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == load_embedded_tokenizer().chat_template
    assert done.serve == (
        f"vllm serve {tmp_path / 'out'} --dtype float32 --max-model-len 640 --enable-auto-tool-choice "
        "--tool-call-parser hermes"
    )
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (done.serve, "| held-out success | 62.5 % |", "| step | 7 |", "`runs/sft/final`", "`lookup_calc`"):
        assert words in card
    assert not list(tmp_path.glob(".*.partial"))


def test_without_a_best_the_final_weights_go_out_and_a_model_folder_can_be_named(run: Path, tmp_path: Path) -> None:
    named = export_model(run / "final", tmp_path / "named", dtype="bfloat16")
    shutil.rmtree(run / "best")
    assert export_model(run, tmp_path / "out", dtype="bfloat16").source == run / "final" == named.source
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored.get("dtype", stored.get("torch_dtype")) == "bfloat16"
    torch.testing.assert_close(logits(tmp_path / "out"), logits(run / "final"), rtol=0.05, atol=0.1)


def test_adapters_are_merged(tmp_path: Path) -> None:
    tokenizer = load_embedded_tokenizer()
    model = add_lora(make_model(len(tokenizer)), LoraSettings(rank=4), seed=0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.eval()(IDS).logits
    save_final(tmp_path / "run", model=model, tokenizer=tokenizer)
    export_model(tmp_path / "run", tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)
    assert (logits(save_model(tmp_path / "base")) - expected).abs().max() > 0.1, "the adapters change something"


def test_what_cannot_be_exported_is_one_clear_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model in it"):
        export_model(tmp_path / "nothing", tmp_path / "out", dtype="float32")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ValueError, match="full is there already"):
        export_model(run, tmp_path / "full", dtype="float32")
