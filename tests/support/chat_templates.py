"""Kinds of chat template, as models bring them, on a byte-level tokenizer that has their special tokens."""

from typing import Any

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{% for tool in tools %}"
    "{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}{% for message in messages %}"
    "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
STRIPS_THINKING = SMOLLM2.replace(
    "message['content'] + '<|im_end|>'",
    "(message['content'].split('</think>')[-1].lstrip('\\n') if message['role'] == 'assistant' and not loop.last"
    " else message['content']) + '<|im_end|>'",
)
THINKS_FIRST = SMOLLM2.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEMPLATES = {
    "SmolLM2": (SMOLLM2, "<|im_end|>"),
    "ChatML with tools": (CHATML_TOOLS, "<|im_end|>"),
    "Llama 3": (LLAMA3, "<|eot_id|>"),
    "strips thinking": (STRIPS_THINKING, "<|im_end|>"),
    "thinks first": (THINKS_FIRST, "<|im_end|>"),
    "without an end of turn": (PLAIN, "<|im_end|>"),
}
"""Name -> template, and the token that ends its turns."""
SPECIAL = ["<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def byte_tokenizer(template: str, eos: str) -> Any:
    """A byte-level BPE with some merges, so that one text has many encodings; ids 0..5 are `SPECIAL`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # As Llama 3 splits: line breaks do not hang on what follows them.
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\S\r\n]?[^\s\p{N}]+|\s*[\r\n]+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        "What is two and two? It is four.\n\n",
        "assistant user system tool response think calc: 12 * 7 = 84\n",
    ] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token="<|begin_of_text|>")
    made.chat_template = template
    return made
