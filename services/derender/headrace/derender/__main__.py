"""`python -m headrace.derender`: one derender process, as `headrace serve derender`."""

from headrace.derender.service import run
from headrace.shared.process import main
from headrace.shared.subjects import Role

if __name__ == "__main__":
    main(Role.DERENDER, run)
