"""The one dictionary of metric names: what each number means and how it is counted.

Numbers in brackets are equations of arXiv 2606.12370. Names with `{depth}`, `{gamma}`, `{batch}`,
`{mode}` stand for a family. A stage that reports a name that is not here fails, so that two runs
never use one word for two things.
"""

import re

METRICS = {
    # acceptance; "conditional" = given that all shallower depths were accepted
    "accept/alpha_{depth}": "conditional rejection-sampling acceptance at a depth: 1 - d_TV (2)",
    "accept/alpha_to_{depth}": "conditional target-only acceptance at a depth: p(argmax q) (1)",
    "accept/cum_{depth}": "cumulative acceptance: product of alpha_1 .. alpha_depth",
    "accept/length": "tokens emitted per verify, 1 + E[L]: with the bonus token (12)",
    "accept/length_to": "as accept/length, with target-only acceptance",
    "accept/rate": "E[L] / gamma: accepted drafts per proposed draft, without the bonus token",
    "accept/start_alpha_1": "held-out alpha_1 of the head before its first training step",
    "accept/decoded_length": "accept/length counted in decoding, not teacher-forced",
    "accept/decoded_length_to": "as accept/decoded_length, with target-only acceptance",
    "entropy/target": "mean entropy of the target distribution (nats per token)",
    "entropy/draft": "mean entropy of the draft distribution at depth 1 (nats per token)",
    "entropy/slope": "slope of accepted drafts on target entropy (per nat)",
    "lossless/p_value": "smallest p-value of the losslessness tests",
    "speedup/predicted": "largest speed-up over plain decoding that step costs predict",
    # training
    "loss/train": "training loss of the stage's own objective",
    "loss/kl": "held-out KL(p || q), mean over depths (nats)",
    "loss/tv": "held-out total variation, mean over depths",
    "loss/e2e_tv": "held-out end-to-end TV loss (13)",
    "train/warmup_steps": "steps trained with the warm-up loss",
    "grad/norm": "gradient norm before clipping",
    # reinforcement learning
    "reward/mean": "mean reward of the step's samples",
    "reward/pass_rate": "share of the step's samples with reward 1",
    "reward/gain": "mean reward of the last quarter of steps minus that of the first quarter",
    "staleness/mean": "mean policy versions between sampling and training of a token",
    "staleness/max": "largest policy-version distance in the step",
    "ratio/mean": "mean importance ratio, trainer policy over behaviour policy",
    "ratio/clip_share": "share of tokens whose ratio was clipped",
    "length/response": "mean response length (tokens)",
    "length/truncated": "share of responses that were cut at max_tokens",
    "groups/zero_variance": "share of prompt groups whose rewards are all equal: no gradient",
    "groups/requeued": "prompt groups sampled again because their rollout worker died",
    "ratio/max": "largest importance ratio of the step",
    "reward/eval_before": "mean reward on held-out prompts before training",
    "reward/eval_after": "mean reward on held-out prompts after training",
    "accept/decoded_alpha_{depth}": "accept/alpha_{depth} counted in decoding",
    "train/steps": "trainer steps of the run",
    # data
    "data/rows_read": "rows or generated entries read, repetitions of a generator left out",
    "data/rejects": "rows that were dropped, each with its reason in rejects.jsonl",
    "data/prompts_{split}": "distinct prompts of one side of the split (train, eval)",
    "data/responses_{split}": "responses that the backbone gave on one side of the split",
    "data/sft_tokens_{split}": "response tokens to train on, on one side of the split",
    "data/pass_rate_{split}": "share of these responses with reward 1",
    # speed
    "speedup/{mode}_g{gamma}_b{batch}": "tokens/s over plain decoding's in the same repeat, median",
    "speedup/best": "largest median speed-up over plain decoding of any mode, gamma and batch",
    "speedup/break_even_{mode}_g{gamma}_b{batch}": "E[L] at which drafts cost what they save",
    "speedup/prediction_error": "median of |predicted / measured speed-up - 1|",
    "accept/decoded_{mode}_g{gamma}": "accept/decoded_length of one mode and gamma, all batches",
    "perf/off_b{batch}_tokens_per_second": "plain decoding at a batch size, median of repeats",
    "perf/tokens_per_second": "tokens per wall-clock second",
    "perf/step_seconds": "wall-clock seconds of one step",
    "perf/wait_seconds": "seconds of a step in which the trainer waited for samples",
    "perf/train_seconds": "seconds of a step spent on probe, update and weight publication",
    "perf/rollout_seconds": "seconds that rollout workers spent on a step's samples, summed",
    "perf/peak_rss_mib": "peak resident memory of the stage process (MiB)",
}

_FAMILY = re.compile(r"\\\{([a-z_]+)\\\}")
_MEMBERS = {"mode": "(?:off|target_only|rejection)"}
_ANY_MEMBER = r"[A-Za-z0-9.-]+"
_PATTERNS = [
    re.compile(_FAMILY.sub(lambda family: _MEMBERS.get(family[1], _ANY_MEMBER), re.escape(name)))
    for name in METRICS
]


def unknown_metrics(names: list[str]) -> list[str]:
    """The names that the dictionary does not define."""
    return [name for name in names if not any(p.fullmatch(name) for p in _PATTERNS)]
