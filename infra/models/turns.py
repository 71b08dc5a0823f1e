"""The next turn's tokens: what a chat template puts behind what was sampled. What was sampled is never encoded again.

A conversation's tokens are a fold: the first prompt, then for each turn the sampled ids and the ids of what the template
adds to them. What it adds begins with the end of the reply's turn. The model has usually sampled that token; what templates
put behind it (ChatML's line break) is not lost.
"""

from collections.abc import Collection, Sequence
from typing import Any

from infra.errors import BadInput
from infra.models.chat import Messages, Tools

_MARK = "\u27e6reply\u27e7"
_PROBES = ("It is four.", "<think>\nTwo and two.\n</think>\n\nIt is four.")


def added_ids(
    tokenizer: Any, messages: Messages, added: Messages, tools: Tools, stops: Collection[int]
) -> list[int] | None:
    """Ids of what follows a reply that ended with one of `stops`: the rest of its turn, `added` messages, and the next
    turn's beginning. messages: those before the reply. None when the template does not render the reply as it is."""
    tail = _tail(tokenizer, messages, added, tools)
    if tail is None:
        return None
    ids = list(tokenizer.encode(tail, add_special_tokens=False))
    # The sampled token stands in the place of the template's own, whichever of the stops it was.
    return ids[1:] if ids and ids[0] in stops else ids


def appends(tokenizer: Any, tools: Tools, role: str = "user") -> bool:
    """Whether a later rendering begins with the tokens of an earlier one and its reply: the template only appends.

    It does not where it drops thinking, or has a generation prompt that it renders in no message. role: of the observations.
    Raises BadInput for a template that refuses a conversation of user, assistant and `role`.
    """
    added: Messages = [{"role": role, "content": "Go on."}]
    for reply in _PROBES:
        messages: Messages = [{"role": "user", "content": "What is two and two?"}]
        folded = _rendered(tokenizer, messages, tools)
        for _ in range(2):
            tail = _tail(tokenizer, messages, added, tools)
            if role != "user" and tail is not None and tail == _tail(tokenizer, messages, _others(added), tools):
                raise BadInput(f"the model's chat template does not render messages of role {role}")
            if tail is None:
                return False
            folded += reply + tail
            messages = [*messages, {"role": "assistant", "content": reply}, *added]
            # As texts: at the border of prompt and reply an encoding of both may have other tokens than were sampled.
            if folded != _rendered(tokenizer, messages, tools):
                return False
    return True


def rendered_ids(tokenizer: Any, messages: Messages, tools: Tools) -> list[int]:
    """A whole conversation by the template, with the beginning of the next reply. BadInput when the template refuses it."""
    return list(tokenizer.encode(_rendered(tokenizer, messages, tools), add_special_tokens=False))


def stop_tokens(tokenizer: Any, more: Sequence[int] | int | None = None) -> frozenset[int]:
    """Ids that end a turn: the tokenizer's EOS, and `more` of the model's generation config."""
    listed = [more] if isinstance(more, int) else list(more or ())
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset([*own, *listed])


def _tail(tokenizer: Any, messages: Messages, added: Messages, tools: Tools) -> str | None:
    text = _rendered(tokenizer, [*messages, {"role": "assistant", "content": _MARK}, *added], tools)
    _, mark, tail = text.rpartition(_MARK)
    return tail if mark else None


def _rendered(tokenizer: Any, messages: Messages, tools: Tools) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise BadInput(f"the chat template refuses the conversation: {error}") from error


def _others(added: Messages) -> Messages:
    """The same with other words: a template that leaves a role out renders both alike."""
    return [{**message, "content": f"Not {message['content']}"} for message in added]
