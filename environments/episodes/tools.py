"""Tools as JSON schemas: whether they are some, and whether a call fits the one that it names."""

import json
from collections.abc import Sequence
from typing import Any

from environments.environment import Environment, Interactive, ToolCall
from infra.errors import BadInput


def check_tools(tools: Sequence[Any], source: str) -> None:
    """Raises BadInput that names the tool which is no function with a JSON schema; `source` is whose tools they are."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    names = []
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise BadInput(
                f'{source}, tool {number}: {{"type": "function", "function": {{"name": ..., "parameters": a JSON schema}}}} '
                f"is expected, not {tool!r:.120}"
            )
        parameters = function.get("parameters", {})
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            raise BadInput(f"{source}, tool {name!r}: its parameters are no JSON schema: {error.message}") from None
        if parameters and (not isinstance(parameters, dict) or parameters.get("type") != "object"):
            raise BadInput(f'{source}, tool {name!r}: its parameters must be of type "object"')
        names.append(name)
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadInput(f"{source}: two tools are called {min(twice)!r}")


def own_tools(environment: Environment) -> list[dict[str, Any]]:
    """What an interactive environment offers with every problem; BadInput for what are no tools."""
    if not isinstance(environment, Interactive):
        return []
    tools: list[dict[str, Any]] = list(getattr(environment, "tools", None) or ())
    check_tools(tools, f"environment {environment.name!r}")
    return tools


def read_call(tools: Sequence[dict[str, Any]], number: int, name: str, arguments: str) -> ToolCall | str:
    """A call whose tool is offered and whose arguments, JSON, fit its schema; or what is wrong, for the policy to read."""
    from jsonschema import Draft202012Validator

    known = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name not in known:
        return f"there is no tool {name!r:.80}; there are: {', '.join(known)}"
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return f"the arguments of {name} are no JSON"
    if not isinstance(values, dict):
        return f"the arguments of {name} are no JSON object"
    error = next(iter(Draft202012Validator(known[name].get("parameters", {})).iter_errors(values)), None)
    if error is not None:
        return f"the arguments of {name} do not fit: {error.message[:200]}"
    return ToolCall(f"call_{number}", name, values)
