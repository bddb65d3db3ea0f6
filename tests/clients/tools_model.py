"""Write a tiny random Llama whose chat template has tools: `python tests/clients/tools_model.py FOLDER`.

Its tokens are bytes, so that its texts are the same tokens when they come back in a conversation. A constant coordinate
of the hidden state gives each token a bias: answers are printable, and strings, objects and answers
end. At temperature 0 it makes no calls, above it does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, CALL = "<|im_end|>", "<tool_call>"
MARKS = (CALL, "</tool_call>", "<think>", "</think>")
BIASES = {'"': 5.0, "}": 5.0, END: 3.5, CALL: 3.5}
"""Logits of these tokens, about. Others have a standard deviation of 2; those that are not printable are below -30."""
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONTEXT = 32768


def write(folder: Path) -> None:
    """Write weights, configuration and tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken(END, special=True)])
    backend.add_tokens([AddedToken(mark) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    tokenizer.chat_template = Path(__file__).with_name("tools_template.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, **SIZES, **ends)
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std={"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.3}.get(name, 0.1))
    bias = torch.full((len(tokenizer),), -40.0)
    bias[[letters.index(chr(code)) for code in range(0x21, 0x7F)] + tokenizer.encode(" ")] = 0.0
    with torch.no_grad():
        for token, value in BIASES.items():
            bias[tokenizer.convert_tokens_to_ids(token)] = value
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(token)] = 0.0
        line = model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids("Ċ")]  # the end of a prompt's last line
        model.lm_head.weight[tokenizer.convert_tokens_to_ids(END)] = -0.15 * line  # so that no answer is empty
        model.model.embed_tokens.weight[:, 0] = 8.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = bias / 5.0
    model.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
