"""`python -m headrace.decode`: one decode process, as `headrace serve decode`."""

from headrace.decode.service import run
from headrace.shared.process import main
from headrace.shared.subjects import Role

if __name__ == "__main__":
    main(Role.DECODE, run)
