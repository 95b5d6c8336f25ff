"""`python -m bebop.diagnosis`."""

from bebop.diagnosis.stage import Config, run
from bebop.stage_cli import main

if __name__ == "__main__":
    main(Config, run, inputs=("dataset", "model"), outputs=("diagnosis", "report"))
