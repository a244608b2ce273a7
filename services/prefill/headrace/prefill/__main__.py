"""`python -m headrace.prefill`: one prefill process, as `headrace serve prefill`."""

from headrace.prefill.service import run
from headrace.shared.process import main
from headrace.shared.subjects import Role

if __name__ == "__main__":
    main(Role.PREFILL, run)
