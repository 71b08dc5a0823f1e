"""Tool calls of a reply, by vLLM's own parsers."""

import json
from typing import Any

from environments.environment import Reply, ToolCall
from environments.episodes.tools import read_call
from infra.errors import BadInput

_STARTS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "tool_call_prefix")


class ToolReader:
    """Reads calls of `tools` out of replies."""

    def __init__(self, tokenizer: Any, parser: str, tools: list[dict[str, Any]]) -> None:
        """Raises BadInput for a parser that vLLM has not, or that the tokenizer has no tokens for."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        known = ToolParserManager.list_registered()
        if parser not in known:
            raise BadInput(f"episodes.tool_parser: vLLM has no parser {parser!r}; it has: {', '.join(known)}")
        self._tools = tools
        self._request = ChatCompletionRequest(messages=[], tools=tools, model="")
        try:
            self._parser = ToolParserManager.get_tool_parser(parser)(tokenizer, [*(self._request.tools or [])])
        except Exception as error:
            raise BadInput(f"episodes.tool_parser {parser!r} does not fit the model's tokenizer: {error}") from error

    def read(self, text: str) -> Reply | str:
        """The reply, with its calls; or what is wrong with one, for the policy to read."""
        try:
            found = self._parser.extract_tool_calls(text, self._request)
        except Exception as error:  # a parser's own: the policy may write anything
            return f"the call cannot be read: {error}"[:300]
        if not found.tools_called:
            starts = {getattr(self._parser, name, None) for name in _STARTS} - {None, ""}
            if any(isinstance(start, str) and start in text for start in starts):
                return "the call cannot be read: it is not in the form that the tools' description asks for"
            return Reply(text)
        calls: list[ToolCall] = []
        for number, call in enumerate(found.tool_calls):
            given = call.function.arguments
            read = read_call(
                self._tools, number, call.function.name, given if isinstance(given, str) else json.dumps(given)
            )
            if isinstance(read, str):
                return read
            calls.append(read)
        return Reply(text, tuple(calls))
