"""Chat templates of the families whose tool calls are read, as short as their models' own are long: how each writes a
call is theirs, how it writes the rest is not."""

from __future__ import annotations

HEAD = "{{ '<|tools|>' + (tools | tojson) if tools }}"
TURN = (
    "{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% else %}"
)
END = "{{ '<|end|>' }}{% endif %}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"


def _with_calls(calls: str, before: str = "", after: str = "", opened: str = "<|assistant|>") -> str:
    each = "{% for call in m.tool_calls or [] %}" + calls + "{% endfor %}"
    section = "{% if m.tool_calls %}" + before + each + after + "{% endif %}"
    return HEAD + TURN + "{{ '" + opened + "' + (m.content or '') }}" + section + END


HERMES = _with_calls(
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
)
QWEN3_CODER = _with_calls(
    "{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{% for key, value in call.function.arguments | items %}"
    "{{ '<parameter=' + key + '>\\n' }}"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
)
GLM45 = _with_calls(
    "{{ '\\n<tool_call>' + call.function.name }}{% for key, value in call.function.arguments.items() %}"
    "{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}"
    "{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}"
)
GLM47 = GLM45.replace("'\\n<arg_key>'", "'<arg_key>'").replace("'\\n</tool_call>'", "'</tool_call>'")
LLAMA3_JSON = _with_calls(
    '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}{{ call.function.arguments | tojson }}'
    "{{ '}' }}{{ '; ' if not loop.last }}"
)
PYTHONIC = "{{ 'Call as [func_name1(key=value)].' if tools }}" + _with_calls(
    "{{ call.function.name + '(' }}{% for key, value in call.function.arguments | items %}"
    "{{ key + '=' }}{{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ')' }}{{ ', ' if not loop.last }}",
    before="{{ '[' }}",
    after="{{ ']' }}",
)
MISTRAL = _with_calls(
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{ ', ' if not loop.last }}",
    before="{{ '[TOOL_CALLS] [' }}",
    after="{{ ']' }}",
)
MISTRAL_ARGS = _with_calls("{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}{{ call.function.arguments | tojson }}")
SECTION = "{{ '<｜tool▁calls▁begin｜>' }}", "{{ '<｜tool▁calls▁end｜>' }}"
DEEPSEEK_V3 = _with_calls(
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}"
    "{{ call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}",
    *SECTION,
)
DEEPSEEK_V31 = _with_calls(
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
    "{{ '<｜tool▁call▁end｜>' }}",
    *SECTION,
)
KIMI_K2 = _with_calls(
    "{{ '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0 | string }}"
    "{{ '<|tool_call_argument_begin|>' }}{{ call.function.arguments | tojson }}{{ '<|tool_call_end|>' }}",
    before="{{ '<|tool_calls_section_begin|>' }}",
    after="{{ '<|tool_calls_section_end|>' }}",
)
GPT_OSS = (
    HEAD + TURN + "{% if m.tool_calls %}{{ '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}"
    "{{ '<|channel|>commentary json<|message|>' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endif %}{% endfor %}{{ '<|start|>assistant' if add_generation_prompt }}"
)
TEMPLATES = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "glm47": GLM47,
    "llama3_json": LLAMA3_JSON,
    "pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "mistral args": MISTRAL_ARGS,
    "deepseek v3": DEEPSEEK_V3,
    "deepseek v3.1": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "gpt_oss": GPT_OSS,
}
ENDS = {"gpt_oss": "<|call|>"}
"""What ends a turn with a call, where that is not `<|end|>`."""
