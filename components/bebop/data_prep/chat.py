"""From a question to prompt tokens, through the model's own chat template."""

import hashlib
from typing import TYPE_CHECKING

from bebop.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QUESTION = "{question}"
# Stands for the user's text while the template around it is cut out; a template may trim spaces.
SENTINEL = "bebop-content-7f3a"


class PromptEncoder:
    """Encodes questions; control tokens inside a question stay plain text.

    Args:
        tokenizer: a fast tokenizer.
        prompt_template: text around the question, with `{question}` in it.
        system_prompt: system message; "" leaves the template's own default.
        use_chat_template: False feeds the prompt text as it is.

    Raises:
        InputError: the tokenizer has no chat template, or one that drops the user's text.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerFast",
        prompt_template: str,
        system_prompt: str,
        use_chat_template: bool,
    ) -> None:
        self.tokenizer, self.prompt_template = tokenizer, prompt_template
        self.system_prompt, self.use_chat_template = system_prompt, use_chat_template
        where = str(tokenizer.name_or_path)
        if use_chat_template and not tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template",
                where=where,
                fix="Take an instruct model, or set use_chat_template=false",
            )
        self._before, found, self._after = self._render(SENTINEL).partition(SENTINEL)
        if not found:
            raise InputError("the chat template drops the user's text", where=where)
        self._control_tokens = list(tokenizer.get_added_vocab())

    def encode(self, question: str) -> list[int]:
        """Tokens of the prompt, up to where the assistant starts to speak."""
        content = self.prompt_template.replace(QUESTION, question)
        if not any(token in content for token in self._control_tokens):
            return self._ids(self._render(content))
        inner = self.tokenizer(content, add_special_tokens=False, split_special_tokens=True)
        return [*self._ids(self._before), *inner["input_ids"], *self._ids(self._after)]

    def template_hash(self) -> str:
        """Identity of everything around the question."""
        chat = self.tokenizer.chat_template if self.use_chat_template else ""
        parts = (str(chat), self.system_prompt, self.prompt_template)
        return f"sha256:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}"

    def _render(self, content: str) -> str:
        if not self.use_chat_template:
            return content
        messages = [{"role": "user", "content": content}]
        if self.system_prompt:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return str(
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def tokenizer_hash(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Identity of the mapping from text to tokens."""
    text = tokenizer.backend_tokenizer.to_str()
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
