"""The contract of the environments, on small and real models."""

import gymnasium.utils.env_checker
import numpy as np
import pytest
import stable_baselines3.common.env_checker

from automap.bounds.known_plans import ROOM, worth_s
from automap.space.count import count_decades, grouped
from automap.space.space import PlanSpace
from automap.space.templates import templates
from envs.decision import MAX_ACTIONS, REWARD_SCALE, Episodes
from envs.hybrid import HybridDecisions, HybridEnv
from envs.kernels import ACTION_FEATURES, STATE_FEATURES
from envs.pipeline import PipelineEnv
from envs.pruning import most_influential
from envs.replication import ReplicationEnv
from envs.sharding import ShardingEnv
from ir import zoo


def make(kind, space):
    if kind == "sharding":
        shape = next(s for s in space.shapes if s.dp > 1 and s.tp > 1 and s.samples % 4 == 0)
        return ShardingEnv(space, space.even_values(shape, recompute="none", zero=1))
    return {"pipeline": PipelineEnv, "replication": ReplicationEnv, "hybrid": HybridEnv}[kind](space)


KINDS = ("sharding", "pipeline", "replication", "hybrid")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["gpt", "vgg19", "shufflenet"])
# Both checkers advise on conventions for control problems that do not apply to masked decisions.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_checkers_accept(kind, model, gpt, light_graph, space):
    graph = gpt() if model == "gpt" else light_graph(model)
    env = make(kind, space(graph, "2x4xA100", 16))
    gymnasium.utils.env_checker.check_env(env, skip_render_check=True)
    stable_baselines3.common.env_checker.check_env(env)


def episode(env, rng):
    observation, _ = env.reset()
    rewards, masks, done = [], [], False
    while not done:
        legal = np.flatnonzero(observation["action_mask"])
        assert len(legal) >= 1
        masks.append(len(legal))
        observation, reward, done, truncated, info = env.step(int(rng.choice(legal)))
        assert not truncated
        rewards.append(reward)
    return rewards, masks, info


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_telescope_to_the_price(kind, gpt, space):
    s = space(gpt(), "2x4xA100", 16)
    env = make(kind, s)
    rng = np.random.default_rng(0)
    for _ in range(15):
        rewards, _, info = episode(env, rng)
        start = env.episodes.first_bound_s
        if kind == "sharding":
            # Its first bound is that behind the frame.
            env.reset()
            start = env.episodes.partial_plans.episodes.bound[0, 0]
        assert sum(rewards) == pytest.approx(REWARD_SCALE * np.log(start / info["finished"].worth_s), rel=1e-6)
        assert all(r <= 1e-9 for r in rewards)
        assert info["finished"].values == s.repair(info["finished"].values)
        assert info["finished"].step_time_s == s.evaluator.evaluate(s.lowered(info["finished"].values)).step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_third_axis_is_decided_like_the_others(kind, space):
    s = space(zoo.build("moe:layers=2,hidden=64,heads=4,ffn=64,experts=4,seq_len=32,vocab_size=128"), "2x4xA100", 16)
    env = make(kind, s)
    rng, middles = np.random.default_rng(0), set()
    for _ in range(10):
        rewards, _, info = episode(env, rng)
        middles.add(s.shape(info["finished"].values).middle)
        assert info["finished"].values == s.repair(info["finished"].values)
        assert all(r <= 1e-9 for r in rewards) and len(rewards) <= 200
        assert info["finished"].step_time_s == s.evaluator.evaluate(s.lowered(info["finished"].values)).step_time_s
    assert kind == "sharding" or middles >= {1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_actions_make_the_same_trajectory(kind, gpt, space):
    first, second = make(kind, space(gpt(), "2x4xA100", 16)), make(kind, space(gpt(), "2x4xA100", 16))
    a, _ = first.reset(seed=1)
    b, _ = second.reset(seed=1)
    rng, done = np.random.default_rng(3), False
    while not done:
        assert all(np.array_equal(a[k], b[k]) for k in a)
        action = int(rng.choice(np.flatnonzero(a["action_mask"])))
        a, r, done, _, _ = first.step(action)
        b, q, _, _, _ = second.step(action)
        assert r == q


def test_a_forbidden_action_becomes_the_nearest_legal_one(gpt, space):
    env = make("hybrid", space(gpt(), "2x4xA100", 16))
    env.reset()
    _, _, done, _, _ = env.step(MAX_ACTIONS - 1)
    assert not done


@pytest.mark.parametrize("name", ["resnet50", "densenet121"])
def test_most_decisions_are_about_operators_and_episodes_are_short(light_graph, space, name):
    env = make("hybrid", space(light_graph(name), "2x2xA100", 16, pp=1))
    _, _, info = episode(env, np.random.default_rng(0))
    assert info["finished"].num_operator_decisions >= info["finished"].num_decisions / 2
    env = make("hybrid", space(light_graph(name), "2x4xA100", 16))
    rng = np.random.default_rng(0)
    assert max(episode(env, rng)[2]["finished"].num_decisions for _ in range(5)) <= 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "cluster"), [("gpt:layers=96,hidden=4096,heads=32", "8x8xA100-80GB"), ("bert-large", "2x8xV100@25Gbit")]
)
def test_transformers_have_short_episodes_mostly_about_operators(spec, cluster, space):
    side, rng, ended = Episodes(HybridDecisions(space(zoo.build(spec), cluster, 128)), 32), np.random.default_rng(0), []
    while len(ended) < 128:
        episodes = side.partial_plans.episodes
        _, done = side.step(episodes.legal[np.arange(32), (rng.random(32) * episodes.offered).astype(int)])
        ended += [side.finished(int(e)) for e in np.flatnonzero(done)]
        if done.any():
            side.begin(done)
    assert max(one.num_decisions for one in ended) <= 200
    assert sum(one.num_operator_decisions for one in ended) >= 0.5 * sum(one.num_decisions for one in ended)


def test_on_long_pipelines_no_rank_but_the_last_recomputes_more_than_the_one_before(gpt, space):
    rng, later = np.random.default_rng(5), 0
    for pp in (8, 16):
        s = space(gpt(layers=16), "16xA100", 64, pp=pp, virtual_stages=1)
        for _ in range(20):
            env = make("hybrid", s)
            values = episode(env, rng)[2]["finished"].values
            modes = values[s.first.recompute : s.first.recompute + pp]
            falls = sorted(modes[:-1], reverse=True) == list(modes[:-1])
            assert falls or pp == 8
            later += pp == 16 and modes[-1] > modes[-2]
    # Memory may bind where the head is.
    assert later


def test_infeasible_plans_are_worth_less_than_feasible_ones(gpt, space):
    s = space(gpt(layers=4, hidden=1024, heads=16, seq=1024, vocab=50000), "2xV100-16GB", 64)
    prices = s.price(np.array([values for _, values in templates(s)]))
    fits = prices[:, 1] <= 0.0
    assert fits.any() and not fits.all()
    best = prices[fits, 0].min()
    worth = worth_s(prices, best)
    assert (worth[fits] == prices[fits, 0]).all()
    assert worth[~fits].min() > best
    assert (worth[~fits] > prices[~fits, 0]).all()


def test_the_mask_drops_what_provably_cannot_fit(gpt, space):
    s = space(gpt(layers=12, hidden=4096, heads=32, seq=1024, vocab=50000), "4xV100-16GB", 32)
    env = make("hybrid", s)
    rng = np.random.default_rng(0)
    masked = 0
    for _ in range(5):
        observation, _ = env.reset()
        done = False
        while not done:
            legal = np.flatnonzero(observation["action_mask"])
            masked += len(legal) < env.episodes.partial_plans.episodes.offered[0]
            observation, _, done, _, _ = env.step(int(rng.choice(legal)))
    assert masked > 0


def test_bounds_in_the_observation_are_the_known_loss(gpt, space):
    env = make("hybrid", space(gpt(), "2x4xA100", 16))
    observation, _ = env.reset()
    rng, done = np.random.default_rng(0), False
    while not done:
        action = int(rng.choice(np.flatnonzero(observation["action_mask"])))
        known = -REWARD_SCALE * observation["observation"][STATE_FEATURES + ACTION_FEATURES * action]
        observation, reward, done, _, _ = env.step(action)
        assert reward <= known + 1e-4


def test_influence_keeps_the_heaviest_groups(light_graph, space):
    s = space(light_graph("vgg19"), "2xA100", 8)
    kept = most_influential(s, 3)
    assert len(kept) == 3
    # The first fully connected layer holds 103 of the 144 million parameters.
    sizes = [
        sum(s.problem.graph.tensors[n].num_elements for n in s.operator(t, s.linkage.types[t].groups[g].leader).inputs)
        for t, g in kept
    ]
    assert max(sizes) > 100e6


def test_the_pruned_size_is_the_number_of_plans_that_are_offered(mlp, space):
    """Brute force counts the first two values of every slot; one group is decided, the other is split by batch."""
    s = space(mlp((16, 32, 16, 16)), "2xA100", 4, num_micro_batches=2)
    groups = most_influential(s, 1)
    pending, plans = [()], 0
    while pending:
        prefix = pending.pop()
        if len(prefix) == len(s.slots):
            plans += 1
            continue
        slot = s.slots[len(prefix)]
        legal = np.flatnonzero(s.legal(prefix))
        if slot.kind == "signature" and (slot.unit_type, slot.group) not in groups:
            legal = legal[:1]
        elif slot.kind not in ("signature", "zero", "recompute"):
            legal = legal[legal < 2]
        pending += [(*prefix, int(v)) for v in legal]
    assert plans > 50
    assert 10 ** count_decades(s, limit=2, signing=grouped(s, groups)) == pytest.approx(plans)


def test_the_pipeline_environment_spreads_experts_over_ep(space):
    s = space(
        zoo.build("moe:layers=2,hidden=64,heads=4,ffn=64,experts=4,seq_len=32,vocab_size=128"),
        "4xA100",
        8,
        ep=4,
        recompute="none",
    )
    _, _, info = episode(make("pipeline", s), np.random.default_rng(0))
    assert (
        info["finished"].values in {values for _, values in templates(s)}
        or s.shape(info["finished"].values).virtual > 1
    )
    (stage, *_) = s.decode(info["finished"].values).stages
    assert all(v["ep"].inputs == ("S(0)", "S(0)") for k, v in stage.shardings.items() if "GroupedMatMul" in k)
    assert any("GroupedMatMul" in k for k in stage.shardings)


def test_episodes_side_by_side_are_the_episodes_alone(gpt, space):
    s = space(gpt(), "2x4xA100", 16)
    many, one = Episodes(HybridDecisions(s), 5), HybridEnv(s)
    rng = np.random.default_rng(0)
    observation, _ = one.reset()
    done = False
    while not done:
        seen = many.observe()
        assert all(np.array_equal(seen[k][3], observation[k]) for k in observation)
        actions = np.array([rng.choice(np.flatnonzero(m)) for m in seen["action_mask"]])
        rewards, ended = many.step(actions)
        observation, reward, done, _, info = one.step(int(actions[3]))
        assert (reward, done) == (rewards[3], ended[3])
    assert many.finished(3) == info["finished"]
    many.begin(np.arange(5) == 3)
    again, _ = one.reset()
    assert np.array_equal(many.observe()["observation"][3], again["observation"])


def completions(s, decisions, rng, episodes=4, known=None):
    """Steps through random plans; yields after each step the episodes, and for each legal value its completion."""
    many = Episodes(decisions, episodes, known=known)
    while not many.partial_plans.done.all():
        yield many
        masks = many.observe()["action_mask"]
        many.step(np.array([rng.choice(np.flatnonzero(mask)) for mask in masks]))


def test_a_completion_is_a_plan_behind_its_value_and_no_faster_than_the_bound(gpt, space):
    s = space(gpt(), "2x4xA100", 16)
    for many in completions(s, HybridDecisions(s), np.random.default_rng(0)):
        episodes, known = many.partial_plans.episodes, many.known.arrays
        for e in range(many.count):
            for i in range(episodes.offered[e]):
                assert known.completed[e, i, 0] >= episodes.action_bounds[e, i, 0] * (1 - 1e-9)
                assert known.completed[e, i, 1] >= episodes.action_bounds[e, i, 1] - 1e-9


@pytest.mark.parametrize("cluster", ["2x4xA100", "1x4xV100+1x4xA100@25Gbit"])
def test_a_completion_is_legal_and_costs_what_its_plan_costs_alone(cluster, gpt, space):
    """Completions share skeletons, units and prices with those before them; none of it changes a float."""
    s, alone = space(gpt(), cluster, 16), PlanSpace(space(gpt(), cluster, 16).problem)
    rng, seen = np.random.default_rng(1), set()
    few = s.random_batch(rng, 8)  # so that most meshes are those of no known plan
    for many in completions(s, HybridDecisions(s), rng, episodes=6, known=(few, s.price(few))):
        for found in filter(None, map(many.best_completion, range(many.count))):
            assert alone.repair(found[0]) == found[0]
            assert found[1] == alone.price(np.array([found[0]]))[0, 0]
            seen.add(found[0])
        many.known.arrays.best_s[:] = np.inf  # so that the best one behind the next decision is seen
    assert len(seen) > 100


@pytest.mark.parametrize("cluster", ["2x4xA100", "1x4xV100+1x4xA100@25Gbit"])
def test_what_is_remembered_is_what_is_worked_out_anew(cluster, gpt, space):
    """Episodes come again to plans that were priced before, beside episodes that remember nothing of them."""
    s, forgetful = (PlanSpace(space(gpt(), cluster, 16).problem) for _ in range(2))
    pair = [Episodes(HybridDecisions(one), 6) for one in (s, forgetful)]
    rng, everything = np.random.default_rng(0), np.ones(6, dtype=np.bool_)
    for turn in range(4):
        actions = np.random.default_rng(turn // 2)  # each random episode twice
        for many in pair:
            # The second pair of turns decides a part of each plan.
            for number in range(6):
                many.confine(number, None, None if turn < 2 else (2, 8 + 3 * number))
            many.begin(everything)
        while not pair[0].partial_plans.done.all():
            forgetful.compiled.cache.plans[:] = 0
            seen, again = (many.observe() for many in pair)
            assert all(np.array_equal(seen[name], again[name]) for name in seen)
            taken = np.array([actions.choice(np.flatnonzero(mask)) for mask in seen["action_mask"]])
            (rewards, done), (same, ended) = (many.step(taken) for many in pair)
            assert np.array_equal(rewards, same) and np.array_equal(done, ended)
            assert pair[0].known.arrays.priced[0] == pair[1].known.arrays.priced[0]
        for number in range(6):
            assert pair[0].finished(number) == pair[1].finished(number)
            assert pair[0].best_completion(number) == pair[1].best_completion(number)
        # The next turn follows other plans.
        found = s.random_batch(rng, 3)
        for many in pair:
            for row, price in zip(found.tolist(), s.price(found).tolist(), strict=True):
                many.known.add(tuple(row), tuple(price))


def test_following_the_best_completions_reaches_what_they_promise(gpt, space):
    """Whoever takes the value with the best completion never does worse than it, and ends at its price."""
    s = space(gpt(), "2x4xA100", 16)
    many = Episodes(HybridDecisions(s), 3)
    many.step(np.random.default_rng(0).integers(0, 64, 3))  # one decision at random
    promised = np.full(3, np.inf)
    while not many.partial_plans.done.all():
        episodes, known = many.partial_plans.episodes, many.known.arrays
        going = ~many.partial_plans.done
        least = np.where(going, known.least, promised)
        assert (least <= promised * (1 + 1e-12)).all()
        promised = least
        best = [known.worth[e, : max(1, episodes.offered[e])].argmin() for e in range(3)]
        many.step(np.array([episodes.legal[e, i] for e, i in enumerate(best)]))
    for e in range(3):
        assert many.finished(e).worth_s == pytest.approx(promised[e], rel=1e-12)


@pytest.mark.parametrize("name", ["Hybrid", "Sharding", "Replication", "Pipeline"])
def test_environments_are_made_by_name(name, gpt, space):
    env = gymnasium.make(f"automap/{name}-v0", problem=space(gpt(), "2x4xA100", 16).problem)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)


def test_a_plan_that_takes_the_place_of_another_lends_no_price_to_plans_being_decided(gpt, space):
    s = space(gpt(), "2x4xA100", 16)
    drawn = s.random_batch(np.random.default_rng(0), 400)
    last = drawn[0]
    many = Episodes(HybridDecisions(s), 1)
    many.known.add(tuple(last.tolist()), (1e9, 0.0))  # the worst of those that join
    for row in drawn[1:ROOM]:
        many.known.add(tuple(row.tolist()), (1e6, 0.0))
    many.begin(np.array([True]))
    episodes = many.partial_plans.episodes
    while episodes.position[0] < s.first.signature:
        many.step(last[episodes.position])
    # It differs in the shape, agrees behind it, and has a price that no plan has.
    other = next(row for row in drawn[ROOM:] if row[0] != last[0]).copy()
    other[s.first.signature :] = last[s.first.signature :]
    many.known.add(tuple(other.tolist()), (1e-9, -1.0))
    while not many.partial_plans.done[0]:
        many.step(last[episodes.position])
        found = many.best_completion(0)
        assert found is None or found[1] > 1e-9
