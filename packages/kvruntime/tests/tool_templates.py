"""Chat templates that know tools, as short as they can be: what they write is what models write.

The tags, the keys and the order are those that the families publish; the words around them are not.
"""

__all__ = ["CALLS", "TEMPLATES"]

HERMES = """\
{%- if tools %}<|im_start|>system
You may call functions. Their signatures are within <tools></tools> XML tags:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Return a call as a json object within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{%- if message.content %}
{{ message.content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}<|start_header_id|>
{%- if message.role == "tool" %}ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("only single tool-calls at once!") }}{% endif %}
{%- set call = message.tool_calls[0].function %}assistant<|end_header_id|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}{{ message.role }}<|end_header_id|>

{% if tools and loop.first %}Given the following functions, respond with a JSON for a call.
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "user" %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs should be 9 characters!") }}{% endif %}
{{- {"name": call.function.name, "arguments": call.function.arguments, "id": call.id} | tojson }}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == "tool" %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}}[/TOOL_RESULTS]
{%- else %} {{ message.content }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""

TEMPLATES = {"hermes": HERMES, "llama3_json": LLAMA3, "mistral": MISTRAL}

# An answer of each, with text before its calls where there can be some.
CALLS = {
    "hermes": (
        "I look it up.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Zürich </tool_call>", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Zürich </tool_call>", "days": 2}}; '
        '{"name": "time", "parameters": {}}'
    ),
    "mistral": (
        'I look it up.\n[TOOL_CALLS] [{"name": "weather", "arguments": '
        '{"city": "Zürich </tool_call>", "days": 2}}, {"name": "time", "arguments": {}}]'
    ),
}
