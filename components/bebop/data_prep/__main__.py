"""`python -m bebop.data_prep`."""

from bebop.data_prep.stage import Config, run
from bebop.stage_cli import main

if __name__ == "__main__":
    main(Config, run, inputs=(), outputs=("dataset", "backbone", "report"))
