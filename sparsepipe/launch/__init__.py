"""From a configuration to running ranks: preparation, jobs and the main function of a rank."""
