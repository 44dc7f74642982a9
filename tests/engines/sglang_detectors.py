"""Reads tool calls with SGLang's own detectors, in its environment: requests as JSON on stdin, answers on stdout."""

import json
import logging
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser


def answer(parser, reasoning, tools, text):
    if reasoning:
        _, text = ReasoningParser(reasoning).parse_non_stream(text)
    said, calls = FunctionCallParser([Tool(**tool) for tool in tools], parser).parse_non_stream(text or "")
    return {"said": said, "calls": [[call.name, json.loads(call.parameters)] for call in calls]}


logging.disable(logging.CRITICAL)
sys.stdout.write(json.dumps([answer(**request) for request in json.load(sys.stdin)]))
