"""A plain Flower project that uses FedPCD."""
