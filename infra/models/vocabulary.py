"""Tokens that a tokenizer has and its model has not: added to the one, without a row in the other's embedding."""

import json
from collections.abc import Iterable
from pathlib import Path

from infra.models.catalog import vocab_size


def foreign_tokens(model: Path) -> dict[int, str]:
    """Id and text of each token of the folder's tokenizer.json that its model has no row for; empty without that file."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return {}
    content, size = json.loads(path.read_text(encoding="utf-8")), vocab_size(model)
    known = content["model"].get("vocab", {})
    # A unigram model lists its tokens with their scores.
    ids = known.items() if isinstance(known, dict) else ((entry[0], index) for index, entry in enumerate(known))
    added = ((token["content"], token["id"]) for token in content.get("added_tokens", []))
    return {index: text for text, index in (*ids, *added) if index >= size}


def first_foreign(ids: Iterable[int], size: int) -> int | None:
    """The first of `ids` that is no row of an embedding of `size`; None when all are."""
    return next((token for token in ids if not 0 <= token < size), None)


def foreign_fault(token: int, text: str | None, size: int) -> str:
    """What is wrong, for a person: "token '<tool>' (id 49153) is not one of the model's 49,152; ..."."""
    name = "token" if text is None else f"token {text!r}"
    return (
        f"{name} (id {token}) is not one of the model's {size:,}; resize the model's embedding to its tokenizer, or "
        "leave the token out"
    )
