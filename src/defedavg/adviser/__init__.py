"""ADVISE: recommends algorithm, n, K, concurrency, rates and timeout for a fleet, a task, a target and a budget."""
