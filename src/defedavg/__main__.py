"""``python -m defedavg`` is the command ``defedavg``."""

from .cli import main

main()
