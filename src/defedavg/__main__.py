"""``python -m defedavg`` is the command ``defedavg``."""

from .cli.main import main

main()
