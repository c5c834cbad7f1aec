"""Payments per category of the merchant: the category is looked up in a table, the latest record of each merchant.

python spending.py fill
headwater describe spending:flow
headwater run spending:flow --until-caught-up
headwater inspect spending:flow --stage category
python spending.py change        merchants get other categories; earlier payments keep theirs
"""
