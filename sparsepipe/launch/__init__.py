"""From a configuration to running ranks: preparation, jobs, what each rank does."""
