"""Forms of single ops that torch's vmap lacks, does badly or gets wrong."""
