"""Names as MLflow takes them: letters, digits, `_ - . : /` and spaces, no empty part between slashes, 250 characters.

Any other character is spelled `_xHHHH_` (`acc@1` is `acc_x0040_1`), as .NET's XmlConvert.EncodeName does; `decode` undoes it.
"""

import hashlib
import re

LONGEST = 250
_OTHER = re.compile(
    r"[^/\w.\- :]"  # what MLflow refuses
    r"|_(?=x[0-9A-Fa-f]{4}(?:[0-9A-Fa-f]{4})?_)"  # what would be read as a spelling
    r"|^/|/(?=/|$)"  # an empty part
    r"|(?<![^/])\.(?=\.?(?:/|$))"  # the parts `.` and `..`, which are folders
    r"|^\.(?=\.)"  # MLflow takes any name that begins so for a way out of its folder
)
_SPELLED = re.compile(r"_x([0-9A-F]{8}|[0-9A-F]{4})_")


def encode(name: str) -> str:
    """The name for MLflow; one that it takes stays. What would be too long is cut and ends in a digest, for good."""
    spelled = _OTHER.sub(_spell, name)
    if len(spelled) <= LONGEST:
        return spelled
    return f"{spelled[: LONGEST - 17]}_{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:16]}"


def decode(name: str) -> str:
    """The name that `encode` was given."""
    return _SPELLED.sub(lambda found: chr(int(found[1], 16)), name)


def _spell(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"_x{code:04X}_" if code < 0x10000 else f"_x{code:08X}_"
