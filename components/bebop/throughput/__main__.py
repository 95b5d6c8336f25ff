"""`python -m bebop.throughput`."""

from bebop.stage_cli import main
from bebop.throughput.stage import Config, run

if __name__ == "__main__":
    main(Config, run, inputs=("dataset", "policy", "diagnosis"), outputs=("throughput", "report"))
