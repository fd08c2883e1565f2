"""Open the database, SQLite or PostgreSQL, and keep its schema: tables, migrations, chained logs.

The rows of each subject are read and written in that subject's folder. Begin with `database.py`; the tables are in
`schema.py` and `ledger_schema.py`.
"""
