"""`python -m bebop.grpo`."""

from bebop.grpo.stage import Config, run
from bebop.stage_cli import main

if __name__ == "__main__":
    main(Config, run, inputs=("dataset", "model", "diagnosis"), outputs=("policy", "report"))
