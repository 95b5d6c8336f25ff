"""`python -m bebop.mtp_sft`."""

from bebop.mtp_sft.stage import Config, run
from bebop.stage_cli import main

if __name__ == "__main__":
    main(Config, run, inputs=("dataset", "backbone"), outputs=("model", "report"))
