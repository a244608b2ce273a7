"""`python -m headrace.render`: one render process, as `headrace serve render`."""

from headrace.render.service import run
from headrace.shared.process import main
from headrace.shared.subjects import Role

if __name__ == "__main__":
    main(Role.RENDER, run)
