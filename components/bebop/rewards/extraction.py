"""What counts as the answer in a response: the one place that decides it.

For every task the candidate is, in this order,

1. the content of the last `<answer>…</answer>`;
2. the rest of the line after the last `####`;
3. for a numeric gold, the last number of the text;
4. for any other gold, the whole text.

A numeric gold then takes one number out of a marked candidate (1 or 2): the first after its last
`=`. So `#### 12 apples`, `<answer>4 - 1 = 3</answer>` and `The answer is 7.` mean 12, 3 and 7.

Numbers: an optional sign, digits with or without `,` between thousands, a decimal part, or a
fraction `a/b`. The Unicode minus is a minus, a no-break space is a space, `$ € £ %` and words
around the number are ignored. A `-` right after a digit or a closing bracket is an operator, not a
sign, so `8-4` ends in 4. Values compare exactly, as fractions of integers.
"""

import re
from fractions import Fraction

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MARK = re.compile(r"####([^\n]*)")
NUMBER = re.compile(
    r"(?:(?<![0-9)\]])[-+])?"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+/[0-9]+|[0-9]*\.[0-9]+|[0-9]+)"
)
PLAIN = str.maketrans({"\u2212": "-", "\u00a0": " ", "\u202f": " ", "$": "", "€": "", "£": ""})
# Longer digit strings are no answers, and Python refuses to convert them.
MAX_NUMBER_LENGTH = 100


def plain(text: str) -> str:
    """The text with ASCII minus signs and spaces and without currency signs."""
    return text.translate(PLAIN)


def marked_answer(text: str) -> str | None:
    """The candidate after an explicit mark (`<answer>` before `####`), or None without a mark."""
    for pattern in (ANSWER_TAG, MARK):
        if found := pattern.findall(text):
            return str(found[-1]).strip()
    return None


def numbers(text: str) -> list[str]:
    """Every number in the text, as written but in plain characters and without commas."""
    found = (match.group().replace(",", "") for match in NUMBER.finditer(plain(text)))
    return [number for number in found if len(number) <= MAX_NUMBER_LENGTH]


def marked_number(candidate: str) -> str | None:
    """The number of a marked candidate: the first after its last `=`; a sign may stand apart."""
    tail = re.sub(r"^([-+])\s+(?=[0-9.])", r"\1", plain(candidate).rpartition("=")[2].strip())
    found = numbers(tail)
    return found[0] if found else None


def extract_number(text: str) -> str | None:
    """The number that a response gives as its answer, or None."""
    marked = marked_answer(text)
    if marked is not None:
        return marked_number(marked)
    found = numbers(text)
    return found[-1] if found else None


def extract_text(text: str) -> str:
    """The text that a response gives as its answer."""
    marked = marked_answer(text)
    return text.strip() if marked is None else marked


def is_number(text: str) -> bool:
    """Whether the whole text is one number, such as a gold answer `-1,204` or `$40`."""
    return NUMBER.fullmatch(plain(text).strip()) is not None


def parse_number(text: str) -> Fraction:
    """The exact value of a number that `numbers` returned.

    Raises:
        ValueError: the text is not a number.
        ZeroDivisionError: a fraction over zero.
    """
    return Fraction(text)


def gsm8k_gold(answer: str) -> str | None:
    """The gold of a GSM8K-style answer: after the last `####`, or the answer if it is a number.

    Returns:
        The number without commas, signs of currency and units; None when there is none.
    """
    if found := MARK.findall(answer):
        return marked_number(found[-1])
    return numbers(answer)[0] if is_number(answer) else None
