import io

from workflows.run_log import RunLog

PRINTED = """Running pipeline: bebop
12:00:00.000 - INFO - Executing task \x1b[96m'mtp-sft'\x1b[0m
    [KFP Executor 2026-12-01 02:40:31,346 INFO]: Got executor_input:
    {
        "inputs": {
            "parameterValues": {}
        }
    }
    train: 10/100, 5 s, 45 s left
    {"a stage may print": "JSON"}
    Writing model shards: 100%|██████████| 1/1 [00:00<00:00, 402.25it/s]
    [KFP Executor 2026-12-01 02:40:31,346 INFO]: Wrote executor output file
12:00:10.000 - INFO - Task 'mtp-sft' outputs:
    model: Model( name='model',
                  uri='/runs/1/model',
                  metadata={} )
"""


def test_the_terminal_shows_the_stages_lines_and_the_log_keeps_all():
    terminal, file = io.StringIO(), io.StringIO()
    log = RunLog(terminal, file)
    for start in range(0, len(PRINTED), 7):  # the runner writes in pieces
        log.write(PRINTED[start : start + 7])
    assert file.getvalue() == PRINTED
    assert terminal.getvalue().splitlines() == [
        "▶ mtp_sft",
        "train: 10/100, 5 s, 45 s left",
        '{"a stage may print": "JSON"}',
    ]
