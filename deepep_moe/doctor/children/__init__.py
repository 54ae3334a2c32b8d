"""Scripts that the doctor runs in processes of their own, as what they load may end or hang the process. They print JSON."""
