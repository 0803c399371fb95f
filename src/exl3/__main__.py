"""`python -m exl3` is the `exl3` command."""

from exl3.cli import main

main()
