"""Model folders as the families publish them: their special tokens, splitting of text and templates' structure.

The vocabularies are trained here on a few lines, or real ones where an installed package ships one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = (
    'The tool answers. Weigh it first:\n\n{"name": "look", "arguments": {"at": "left"}}\n\n\n',
    '<tool_response>\nA tree, 12 houses\n</tool_response>\n"parameters": {"at": "right"}}\n\n',
)
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_SPECIAL = (*CHATML_SPECIAL, "<|fim_prefix|>")
HERMES_MARKUP = ("<tool_call>", "</tool_call>")
THINKING_MARKUP = ("<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA_SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)

QWEN_SYSTEM = """\
{%- set system = messages[0].content if messages[0].role == 'system' else DEFAULT %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + 'Functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif system %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
"""
QWEN_RESULTS = """\
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
QWEN_CALL = """'<tool_call>\\n{"name": "' + call.function.name + '", "arguments": '
            + (call.function.arguments | tojson) + '}\\n</tool_call>'"""
QWEN3 = (
    QWEN_SYSTEM.replace("DEFAULT", "''")
    + """\
{%- set query = namespace(index=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set query.index = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content, thought = message.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > query.index and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if content or not loop.first else '' }}{{- CALL }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
RESULTS
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""".replace("RESULTS\n", QWEN_RESULTS).replace("CALL", QWEN_CALL)
)
QWEN3_THINKING = QWEN3.replace(
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)
QWEN3_INSTRUCT = QWEN3.replace("'</think>' in content", "false").replace(
    "loop.index0 > query.index and (loop.last or thought)", "false"
)
QWEN2_5 = (
    QWEN_SYSTEM.replace("DEFAULT", "'You are an assistant.'")
    + """\
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}{{- '\\n' + CALL }}{%- endfor %}
        {{- '<|im_end|>\\n' }}
RESULTS
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".replace("RESULTS\n", QWEN_RESULTS).replace("CALL", QWEN_CALL)
)
LLAMA3 = """\
{{- bos_token }}
{%- set has_system = messages[0].role == 'system' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + ('Environment: ipython\\n' if tools is not none else '') }}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{{- (messages[0].content | trim if has_system else '') + '<|eot_id|>' }}
{%- set rest = messages[1:] if has_system else messages %}
{%- for message in rest %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools is not none %}
            {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model as its makers publish it, weights left out."""

    name: str
    family: str
    template: str
    special: tuple[str, ...]
    markup: tuple[str, ...] = ()
    """One id each, but text that the policy writes or reads."""
    eos: str
    split: str = QWEN_SPLIT

    def tokenizer(self) -> Tokenizer:
        """A small byte-level vocabulary, split and normalised as the family does it."""
        tokenizer = Tokenizer(models.BPE(ignore_merges=self.family == "llama3"))
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
        )
        return self.dress(tokenizer, trainer)

    def dress(self, tokenizer: Tokenizer, trainer: trainers.BpeTrainer | None = None) -> Tokenizer:
        """Give a model of bytes the family's splitting and tokens, and train it first if there is a trainer."""
        if self.family.startswith("qwen"):
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(self.split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        if trainer is not None:
            tokenizer.train_from_iterator(TEXTS, trainer)
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in self.special])
        tokenizer.add_tokens([AddedToken(text, special=False) for text in self.markup])
        return tokenizer

    def write(self, folder: Path, *, tokenizer: Tokenizer | None = None, template: str | None = None) -> Path:
        """Write what a renderer reads of a model folder."""
        tokenizer = tokenizer or self.tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.special[0],
            "eos_token": self.eos,
            "pad_token": self.eos,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(template or self.template)
        return folder


def _qwen3(name: str, template: str) -> Published:
    markup = HERMES_MARKUP + THINKING_MARKUP
    return Published(
        name=name, family="qwen3", template=template, special=QWEN_SPECIAL, markup=markup, eos="<|im_end|>"
    )


HYBRID = _qwen3("qwen3", QWEN3)
THINKING = _qwen3("qwen3-thinking", QWEN3_THINKING)
INSTRUCT = _qwen3("qwen3-instruct", QWEN3_INSTRUCT)
QWEN = Published(
    name="qwen2.5",
    family="qwen2.5",
    template=QWEN2_5,
    special=QWEN_SPECIAL,
    markup=HERMES_MARKUP,
    eos="<|im_end|>",
)
LLAMA = Published(
    name="llama3",
    family="llama3",
    template=LLAMA3,
    special=LLAMA_SPECIAL,
    eos="<|end_of_text|>",
    split=LLAMA_SPLIT,
)
"""Some of its folders name as eos_token what ends a document; a turn ends with <|eot_id|> all the same."""
PLAIN = Published(name="chatml", family="chatml", template=CHATML, special=CHATML_SPECIAL, eos="<|endoftext|>")
PUBLISHED = (HYBRID, THINKING, INSTRUCT, QWEN, LLAMA, PLAIN)
