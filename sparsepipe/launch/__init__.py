"""From a configuration to running ranks: preparation, jobs, the main function of a rank."""
