"""A small Beam with every feature of the family and a real tokenizer, for training end to end on a laptop's CPU.

`python -m infra.models.beam.tiny FOLDER` writes it; equal seeds write equal bytes.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from infra.models.beam import checkpoint
from infra.models.beam.config import BeamConfig

PAD, END, ROLES = "<|pad|>", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = ("What is {a} + {b}? Reply with the number only.", "{a} plus {b} equals", "Compute {a} + {b}.")
WORDS = """
You are a helpful assistant. The answer is the sum of both numbers. Think step by step, then write only the final
number. First add the ones, carry the tens, and check your result before you reply. Is this right? Yes, that is
correct; no, it is not. How many apples are there when two children each have three, and another brings some more?
Please explain why, and show the working. Given a list of numbers, find the largest, the smallest and the difference
between them. Multiply, subtract or divide where the question asks for it. Write a function that returns the value;
test it with small inputs. Sorry, I made a mistake: let me try again with other steps. Great, now continue with the
next problem.
"""


def write_beam_tiny(dest: Path, seed: int = 0) -> Path:
    """Write the Hugging Face folder of a Beam of 4.6 million parameters, freshly initialised from `seed`, into `dest`.

    Three sliding layers and a full one, the first dense and the others sparse (16 experts, 4 a token, grouped routing),
    soft cap; bf16 weights with fp32 routers. Returns `dest`.
    """
    from safetensors.torch import save_file

    dest.mkdir(parents=True, exist_ok=True)
    tokenizer = _write_tokenizer(dest)
    config = _config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    config.save_pretrained(dest)
    _write_generation_config(dest, config)
    save_file(_weights(config, seed), dest / "model.safetensors", metadata={"format": "pt"})
    return dest


def _config(vocab_size: int, pad: int, end: int) -> BeamConfig:
    return BeamConfig(
        architectures=["BeamForCausalLM"],
        dtype="bfloat16",
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        sliding_window=16,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        final_logit_softcapping=30.0,
        pad_token_id=pad,
        eos_token_id=end,
    )


def _weights(config: BeamConfig, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in checkpoint.shapes(config).items():
        if name.endswith("norm.weight"):
            tensor = torch.ones(shape)
        elif name.endswith("gate_bias"):
            tensor = torch.zeros(shape)
        else:
            tensor = torch.randn(shape, generator=generator) * _std(name, shape)
        weights[name] = tensor.to(checkpoint.dtype_of(name, torch.bfloat16))
    return weights


def _std(name: str, shape: tuple[int, ...]) -> float:
    """What a sublayer adds has unit scale (its post-norm), so the embedding has too; small logits: near uniform."""
    if name == "model.embed_tokens.weight":
        return 1.0
    if name == "lm_head.weight":
        return 0.02
    if name.endswith("e_score_correction_bias"):
        return 0.01
    return shape[-1] ** -0.5


def _write_generation_config(dest: Path, config: BeamConfig) -> None:
    from transformers import GenerationConfig

    generation = GenerationConfig(do_sample=True, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    generation.save_pretrained(dest)


def _write_tokenizer(dest: Path) -> Any:
    """Byte-level BPE, 512 tokens, every digit a token of its own, so that sums are written digit by digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    questions = (q.format(a=a, b=b) for q, a, b in itertools.product(QUESTIONS, range(100), range(0, 100, 7)))
    bpe.train_from_iterator(itertools.chain(questions, WORDS.split("\n") * 50), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, model_max_length=1024, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(dest)
    return tokenizer


if __name__ == "__main__":
    write_beam_tiny(Path(sys.argv[1]))
