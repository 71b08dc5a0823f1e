"""Small models with real tokenizers, made in a second: what the integration tests train."""

import json
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """A random Llama of 2 layers (hidden 128, GQA, tied embeddings) with a byte-level tokenizer, as a HF folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM attends on CPUs with multiples of 32
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def store_head(folder: Path) -> None:
    """Store a tied model's embedding a second time, as some tools do."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / "model.safetensors", {"format": "pt"})


def add_strays(folder: Path) -> None:
    """Give a model of one file an index, and beside it files of its tensors' names, of other dtypes and values."""
    from safetensors.torch import load_file, save_file

    shard, tensors = "model-00001-of-00001.safetensors", load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    old = {name: tensor.double() + 1 for name, tensor in tensors.items()} | {HEAD: tensors[EMBEDDING].double()}
    for name in ("consolidated.safetensors", "adapter_model.safetensors", "model-00001-of-00002.safetensors"):
        save_file(old, folder / name)
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    config = {"base_model_name_or_path": "elsewhere", "peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def byte_tokenizer():
    """256 bytes and the chat's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["<|system|>", "<|user|>", "<|assistant|>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": roles})
    fast.chat_template = CHAT_TEMPLATE
    return fast
