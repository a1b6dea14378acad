"""Makes the folder of a tiny, randomly initialised policy with its tokenizer; trainer.sft teaches it the rest.

python -m trainer.tiny OUT --corpus texts.txt
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from common.errors import SetupError

VOCAB_SIZE = 576
MAX_POSITIONS = 512
PAD, TURN_OPEN, TURN_CLOSE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (PAD, TURN_OPEN, TURN_CLOSE)
"""Never part of a turn's text."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One id each, but text that the policy writes or reads."""
EMBEDDING_STD = 0.12
"""Large enough that tokens differ from the start; at the usual 0.02 a model of this size does not learn to copy."""

# ChatML with Hermes tool calls. Tools are shown in the shape of a call, without descriptions: a policy of this size
# makes nothing of them, and they would double the prompt.
CHAT_TEMPLATE = """\
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if tools %}
        {{- '\\n\\n' if messages[0].role == 'system' else '' }}
        {{- '<tools>' }}
        {%- for tool in tools %}
            {{- '\\n{"name": "' + tool.function.name + '", "arguments": {' }}
            {%- for name, schema in tool.function.parameters.properties.items() %}
                {{- ', ' if not loop.first else '' }}
                {{- '"' + name + '": "' + (schema.type | default('any')) + '"' }}
            {%- endfor %}
            {{- '}}' }}
        {%- endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE over `texts` with VOCAB_SIZE entries; numbers split into pieces of at most two digits.

    Raises SetupError when the texts hold too little for that many entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in CONTROL_TOKENS]
    markup = [AddedToken(text, special=False) for text in MARKUP_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special + markup,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SetupError(
            f"the corpus gives {tokenizer.get_vocab_size()} of {VOCAB_SIZE} tokenizer entries: add more varied texts"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "eos_token": TURN_CLOSE,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make_model(*, eos_id: int, pad_id: int, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.16 M parameters with random weights."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=192,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=eos_id,
        pad_token_id=pad_id,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    model.generation_config = GenerationConfig(eos_token_id=eos_id, pad_token_id=pad_id)
    return model


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write config and float16 weights."""
    model.half().save_pretrained(folder)


def make_folder(out: Path, corpus: list[Path], *, seed: int) -> None:
    """Write tokenizer and model to `out`. The corpus holds one text a line."""
    texts = [line for path in corpus for line in path.read_text(encoding="utf-8").split("\n")]
    tokenizer = make_tokenizer(texts)
    out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, out)
    vocab = tokenizer.get_vocab()
    model = make_model(eos_id=vocab[TURN_CLOSE], pad_id=vocab[PAD], seed=seed)
    save_model(model, out)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.tiny", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--corpus", type=Path, action="append", required=True, help="texts for the tokenizer, one a line; repeatable"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    arguments = parser.parse_args()
    disable_progress_bar()
    try:
        make_folder(arguments.out, arguments.corpus, seed=arguments.seed)
    except (SetupError, OSError) as error:
        sys.exit(f"trainer.tiny: {error}")


if __name__ == "__main__":
    main()
