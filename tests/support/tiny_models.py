"""Small random checkpoints with a tokenizer, for tests that need a model's machinery and not its knowledge."""

from pathlib import Path
from typing import Any

import torch

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
VOCABULARY = 258


def dense(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A Llama with tied embeddings, as SmolLM2 is. `changes`: of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_COMMON | {"intermediate_size": 96, "tie_word_embeddings": True} | changes)
    return _save(LlamaForCausalLM, config, folder, seed)


def experts(folder: Path, seed: int = 0) -> Path:
    """A Qwen3 with 8 experts, 2 a token; their size is no multiple of 32, so that vLLM's CPU kernel pads them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_COMMON,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return _save(Qwen3MoeForCausalLM, config, folder, seed)


def beam(folder: Path, seed: int = 0) -> Path:
    """The small Beam, in fp32."""
    import json

    from safetensors.torch import load_file, save_file

    from infra.models.beam.register import register
    from infra.models.beam.tiny import write_beam_tiny

    register()
    write_beam_tiny(folder, seed)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return folder


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "initializer_range": 0.3,
}


def _save(kind: Any, config: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    kind(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words[:VOCABULARY])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast
