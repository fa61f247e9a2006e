"""The peer of the rollouts benchmark: TRL's own tool loop, with its single-turn generation handed to our engine.

What runs is `GRPOTrainer._generate`, for each batch: tokenisation, generation, reading of calls, `_tool_call_loop`
and TRL's metrics. Nothing of it is replaced but `_generate_single_turn`, which samples all prompts of a turn at once
in the same engine. What TRL does with the batch afterwards (rewards, logprobs, loss) is left out.

Two contenders:

- `trl`: the loop as it is. Its tool is asynchronous; of one sample the calls run at once, but sample after sample.
- `trl_at_once`: what the loop would take if the tools of a whole batch ran at once. Each tool is begun for it as soon
  as the turn that calls it has been sampled, and TRL's call waits for that one.

Chosen in TRL's favour: one batch is as large as the number of trajectories that may run at once; no environment
factory, whose instances would have to be reset; the response template of Qwen3, whose calls look like our model's;
and the chat template is the model's own, which TRL finds prefix-preserving. TRL's asynchronous trainer, whose rollouts
do not wait for each other, has another loop and wants a vLLM server; it is not measured here.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from data.types import Completion, SamplingParams
from envs.types import Task
from rollouts.engine import Engine, EngineError
from scripts.bench_rollouts_plan import SYSTEM, Facts, Plan


class TrlPeer:
    """TRL's trainer over a model folder; built before vLLM starts, whose process group it would take for its own."""

    def __init__(self, model: Path, plan: Plan, facts: Facts, *, limit: int, at_once: bool, folder: Path) -> None:
        self._plan = plan
        self._limit = limit
        self._begun: dict[str, Future[str]] | None = {} if at_once else None
        self._facts = facts
        self._tool = _waiting_tool(facts, self._begun) if self._begun is not None else facts.lookup
        self._trainer = _trainer(model, self._tool, self._generate_turn, limit, folder)
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rows: list[str] = []
        self._turn = 0

    async def run(self, engine: Engine, tasks: Sequence[Task]) -> None:
        """The tasks in batches, one after the other.

        Raises:
            EngineError: TRL's results are not what the plan says.
        """
        self._engine, self._loop = engine, asyncio.get_running_loop()
        for start in range(0, len(tasks), self._limit):
            await asyncio.to_thread(self._run_batch, tasks[start : start + self._limit])

    def _run_batch(self, tasks: Sequence[Task]) -> None:
        self._rows, self._turn = [task.task_id for task in tasks], 0
        # As `_generate_and_score_completions` does before it generates.
        self._trainer._sync_tool_dicts = [{} for _ in tasks]
        self._trainer._async_tool_dicts = [{"lookup": self._tool} for _ in tasks]
        prompts = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}] for task in tasks]
        _, completion_ids, tool_mask, *_ = self._trainer._generate(prompts)
        for task, ids, mask in zip(tasks, completion_ids, tool_mask, strict=True):
            sampled = [token for token, is_sampled in zip(ids, mask, strict=True) if is_sampled]
            if sampled != [token for turn in self._plan.turns[task.task_id] for token in turn.token_ids]:
                raise EngineError(f"TRL's sampled tokens of {task.task_id} are not what the plan says")

    def _generate_turn(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """One turn of the batch. TRL keeps the order of its samples, and drops those that made no call."""
        assert self._engine is not None
        assert self._loop is not None
        if self._turn:
            self._rows = [row for row in self._rows if self._plan.turns[row][self._turn - 1].key is not None]
        done = asyncio.run_coroutine_threadsafe(self._sample(self._engine, prompts), self._loop).result()
        if self._begun is not None:
            for row in self._rows:
                key = self._plan.turns[row][self._turn].key
                if key is not None:
                    self._begun[key] = asyncio.run_coroutine_threadsafe(
                        self._facts.lookup(key), self._trainer.async_loop
                    )
        self._turn += 1
        return [list(one.token_ids) for one in done], [list(one.logprobs) for one in done]

    async def _sample(self, engine: Engine, prompts: list[list[int]]) -> list[Completion]:
        stop = self._trainer._tokenizer.eos_token_id
        params = SamplingParams(max_tokens=256, stop_token_ids=(stop,))
        return await asyncio.gather(
            *(
                engine.generate(f"trl/{row}/0/{self._turn}", prompt, params)
                for row, prompt in zip(self._rows, prompts, strict=True)
            )
        )


def _waiting_tool(facts: Facts, begun: dict[str, Future[str]]) -> Callable[[str], Coroutine[Any, Any, str]]:
    async def lookup(key: str):
        return await asyncio.wrap_future(begun.pop(key))

    lookup.__doc__ = facts.lookup.__doc__
    return lookup


def _trainer(
    model: Path,
    tool: Callable[[str], Coroutine[Any, Any, str]],
    generate_turn: Callable[[list[list[int]]], tuple[list[list[int]], list[list[float]]]],
    limit: int,
    folder: Path,
) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the version of vLLM, of which it uses nothing here
        from trl import GRPOConfig, GRPOTrainer
        from trl.chat_template_utils import qwen3_template

    class EngineTrainer(GRPOTrainer):
        def _generate_single_turn(
            self,
            prompt_ids: Any,
            images: Any,
            multimodal_fields: Any,
            num_generations: int,
            has_tool_images: bool = False,
        ) -> Any:
            return generate_turn(prompt_ids)

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template
    policy = AutoModelForCausalLM.from_pretrained(model)
    return EngineTrainer(
        model=policy,
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=limit,
            num_generations=limit,  # of no consequence here, but a batch must hold whole groups
            max_completion_length=policy.config.max_position_embeddings,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        reward_funcs=lambda **columns: [0.0] * len(columns["prompts"]),
        tools=[tool],
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "."}]}] * limit),
    )
