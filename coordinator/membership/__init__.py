"""The members of a job, the forming of generations, and recovery. Pure."""
