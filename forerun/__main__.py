"""`python -m forerun`, and what the `forerun` command runs: Ctrl-C has its answer before anything else is imported."""

from __future__ import annotations

from forerun.interrupt import answer_interrupts


def main() -> None:
    answer_interrupts()
    from forerun.cli import main as run

    run()


if __name__ == "__main__":
    main()
