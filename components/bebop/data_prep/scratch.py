"""A small Llama with its own tokenizer, trained in seconds on the task at hand.

It lets every later stage run for real without a download: `scratch_text` says what it learns.

Shapes: B batch, T tokens.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bebop.data_prep.chat import QUESTION, PromptEncoder
from bebop.data_prep.rows import Question
from bebop.data_prep.scratch_text import write_response
from bebop.progress import Progress
from bebop.tracking import NO_TRACKING, Tracker

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A digit, a word or a run of signs, each with the space before it; other spaces alone.
WORDS = r" ?[0-9]| ?\p{L}+| ?[^\s\p{L}0-9]+|\s+"
MAX_POSITIONS = 512
IGNORED = -100
# Wrong answers come in after this share of the steps: arithmetic is learnt faster without them.
NOISE_FROM = 0.7


@dataclass(frozen=True)
class ScratchRecipe:
    """Size and training of the model; about `layers * 15 * hidden**2` parameters."""

    vocabulary: int = 384
    hidden: int = 192
    layers: int = 2
    steps: int = 180
    batch: int = 24
    learning_rate: float = 0.03
    noise: float = 0.35
    seed: int = 0


def make_scratch_model(
    recipe: ScratchRecipe,
    questions: Sequence[Question],
    prompt_template: str,
    folder: Path,
    tracker: Tracker = NO_TRACKING,
) -> float:
    """Train tokenizer and model on the questions and save them where transformers loads them.

    Args:
        recipe: size and training.
        questions: training questions only: what is held out must not be in the text.
        prompt_template: text around the question.
        folder: an existing folder.
        tracker: gets the loss of every tenth step.

    Returns:
        Training loss at the end (nats per response token).
    """
    import torch

    rng = random.Random(recipe.seed)
    tokenizer = train_tokenizer(recipe, questions, prompt_template, rng)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = new_model(recipe, tokenizer)
        encoder = PromptEncoder(tokenizer, prompt_template, "", True)
        loss = train(model, encoder, recipe, questions, rng, tracker)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def train_tokenizer(
    recipe: ScratchRecipe, questions: Sequence[Question], prompt_template: str, rng: random.Random
) -> "PreTrainedTokenizerFast":
    """A byte-level BPE in which no token holds two digits, and ChatML around messages."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [prompt_template.replace(QUESTION, question.text) for question in questions]
    texts += [write_response(question, questions, 0.0, rng) for question in questions]
    tokenizer.train_from_iterator([*texts, "user\n", "assistant\n", "system\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START],
        chat_template=CHATML,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=MAX_POSITIONS,
    )


def new_model(recipe: ScratchRecipe, tokenizer: "PreTrainedTokenizerFast") -> "LlamaForCausalLM":
    """A Llama with grouped-query attention and tied embeddings, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=4 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.get_vocab()[START],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: "LlamaForCausalLM",
    encoder: PromptEncoder,
    recipe: ScratchRecipe,
    questions: Sequence[Question],
    rng: random.Random,
    tracker: Tracker = NO_TRACKING,
) -> float:
    """Teach the responses; fresh ones are drawn for every step.

    Returns:
        Mean loss of the last tenth of the steps (nats per response token).
    """
    optimizers = make_optimizers(model, recipe)
    prompts = {question.prompt_id: encoder.encode(question.text) for question in questions}
    prefix = shared_prefix(list(prompts.values()))
    losses: list[float] = []
    with Progress("train the scratch model", recipe.steps) as progress:
        for step in range(recipe.steps):
            noise = recipe.noise if step >= NOISE_FROM * recipe.steps else 0.0
            drawn = rng.choices(questions, k=recipe.batch)
            rows = [(prompts[q.prompt_id], write_response(q, questions, noise, rng)) for q in drawn]
            tokens_BT, labels_BT = make_batch(encoder.tokenizer, rows)
            loss = response_loss(model, prefix, tokens_BT, labels_BT)
            loss.backward()
            for optimizer, scheduler in optimizers:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            progress.advance(1, f"loss {losses[-1]:.2f}")
            if step % 10 == 0:
                tracker.log({"loss/train": losses[-1]}, step)
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def shared_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """What all prompts start with, short of the shortest one's last token."""
    first, last = min(prompts), max(prompts)
    length = 0
    while length < min(map(len, prompts)) - 1 and first[length] == last[length]:
        length += 1
    return first[:length]


def response_loss(
    model: "LlamaForCausalLM",
    prefix: list[int],
    tokens_BT: "torch.Tensor",
    labels_BT: "torch.Tensor",
) -> "torch.Tensor":
    """Mean loss of the labelled tokens.

    The shared start of the prompts is computed once and its keys and values serve all rows: that
    saves about a quarter of the time on short questions, and the gradient is the same.
    """
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    if prefix:
        model.model(input_ids=torch.tensor([prefix]), cache=cache)
        cache.batch_repeat_interleave(len(tokens_BT))
    return model(input_ids=tokens_BT, labels=labels_BT, cache=cache).loss


def make_optimizers(
    model: "LlamaForCausalLM", recipe: ScratchRecipe
) -> "list[tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]]":
    """Muon for the layers' matrices, AdamW for the rest, with their schedules."""
    import torch

    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "layers" not in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.learning_rate, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=recipe.learning_rate / 4, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    return [
        (o, torch.optim.lr_scheduler.LambdaLR(o, lambda step: schedule(step, recipe.steps)))
        for o in optimizers
    ]


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: linear warm-up over a tenth, then a cosine to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def make_batch(
    tokenizer: "PreTrainedTokenizerFast", rows: Sequence[tuple[list[int], str]]
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Right-padded tokens and labels [B, T]; prompt and padding have the label -100.

    Padding on the right needs no attention mask: causal attention never looks at it.
    """
    import torch

    sequences = []
    for prompt, text in rows:
        response = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        sequences.append((prompt, response))
    width = max(len(prompt) + len(response) for prompt, response in sequences)
    tokens_BT = torch.full((len(sequences), width), tokenizer.pad_token_id)
    labels_BT = torch.full((len(sequences), width), IGNORED)
    for row, (prompt, response) in enumerate(sequences):
        end = len(prompt) + len(response)
        tokens_BT[row, :end] = torch.tensor([*prompt, *response])
        labels_BT[row, len(prompt) : end] = torch.tensor(response)
    return tokens_BT, labels_BT
