"""Another tokenizer than the tiny models', and text that both must get right."""

from __future__ import annotations

import tokenizers

from forerun.text.tokenizer import Tokenizer

STORY = "The keeper's lamp 🌊 was naïve: 12 ships, 3 gulls… and «Größe» 漢字!\n    def turn(lamp):\n\treturn 30 👩‍🚀\n"


def train(text: str, size: int) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|im_end|>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    return backend


def other_tokenizer() -> Tokenizer:
    """Trained on other text, to another size: few ids and few cuts in common with the tiny models' tokenizer."""
    return Tokenizer(train("return the ships; keeper of gulls and Größe. " * 3 + STORY, 400), eos_ids=[0])
