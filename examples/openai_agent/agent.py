"""An agent with a calculator, on OpenAI's client: ``python agent.py "Calculate 37 * 48."``.

It knows nothing of relax-rt. It speaks to whatever OPENAI_BASE_URL and OPENAI_API_KEY name, and prints its answer.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from typing import Any

from openai import OpenAI

TURNS = 3
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "evaluates an expression",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
OPERATORS: Any = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
CALL = {"name": "calculator", "arguments": '{"expression": "21 * 4"}'}
EXAMPLE: Any = [
    {"role": "system", "content": "Use the calculator, then answer with the number alone."},
    {"role": "user", "content": "Calculate 21 * 4."},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "example", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "example", "content": "84"},
    {"role": "assistant", "content": "84"},
]


def calculate(arguments: str) -> str:
    """The value of an expression of whole numbers, or what is wrong with it."""
    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        return f"error: {type(error).__name__}"


def value(node: ast.AST) -> int:
    """Of a part of an expression."""
    match node:
        case ast.Constant(value=int(number)) if abs(number) < 10**9:
            return int(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return int(OPERATORS[type(op)](value(left), value(right)))
    raise ValueError("no expression of whole numbers")


def answer(question: str) -> str:
    """What the model says in the end."""
    client = OpenAI()
    messages = [*EXAMPLE, {"role": "user", "content": question}]
    for _ in range(TURNS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        said = reply.choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            result = calculate(call.function.arguments) if call.type == "function" else "error: no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


if __name__ == "__main__":
    print(answer(sys.argv[1]))
