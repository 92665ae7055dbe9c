// The time steps of LSTMs and GRUs, which accelerators run as one kernel each, where the
// CPU has none: aten/src/ATen/native/cuda/RNN.cu. Included by device.cpp, in its namespace.
//
// Gates are in float32 or wider, as there. `kept` is for the backward pass: i, f, g and o of
// an LSTM; r, z, n, the old state and its part of n of a GRU.

Tensor sum_of(const Tensor& gates, const std::optional<Tensor>& bias) {
  auto wide = host(gates).to(kFloat);
  if (gates.scalar_type() == kDouble) wide = host(gates);
  return bias && bias->defined() ? wide + host(*bias) : wide;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& of_input, const Tensor& of_hidden,
                                             const Tensor& cx, const std::optional<Tensor>& bias,
                                             const std::optional<Tensor>& hidden_bias) {
  auto gates = (sum_of(of_input, bias) + sum_of(of_hidden, hidden_bias)).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), o = gates[3].sigmoid();
  auto g = gates[2].tanh(), c = f * host(cx) + i * g, h = o * c.tanh();
  auto dtype = of_input.scalar_type();
  auto kept = at::cat({i, f, g, o}, 1).to(dtype);
  note("launch", "aten::_thnn_fused_lstm_cell", {of_input, of_hidden, cx}, {h, c, kept});
  return {device(h.to(dtype)), device(c.to(dtype)), device(kept)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& of_h, const std::optional<Tensor>& of_c, const Tensor& cx,
    const Tensor& cy, const Tensor& kept, bool has_bias) {
  auto wide = [](const Tensor& t) {
    return t.scalar_type() == kDouble ? host(t) : host(t).to(kFloat);
  };
  auto gates = wide(kept).chunk(4, 1);
  auto i = gates[0], f = gates[1], g = gates[2], o = gates[3], t = wide(cy).tanh();
  auto dh = of_h && of_h->defined() ? wide(*of_h) : at::zeros_like(t);
  auto dc = dh * o * (1 - t * t);
  if (of_c && of_c->defined()) dc = dc + wide(*of_c);
  auto all = at::cat({dc * g * i * (1 - i), dc * wide(cx) * f * (1 - f),
                      dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  auto dtype = kept.scalar_type();
  auto dcx = (dc * f).to(dtype);
  note("launch", "aten::_thnn_fused_lstm_cell_backward", {cx, cy, kept}, {all, dcx});
  return {device(all.to(dtype)), device(dcx), has_bias ? device(all.sum(0).to(dtype)) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& of_input, const Tensor& of_hidden,
                                    const Tensor& hx, const std::optional<Tensor>& bias,
                                    const std::optional<Tensor>& hidden_bias) {
  auto x = sum_of(of_input, bias).chunk(3, 1), h = sum_of(of_hidden, hidden_bias).chunk(3, 1);
  auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
  auto dtype = of_input.scalar_type();
  auto out = (n + z * (host(hx) - n)).to(dtype);
  auto kept = at::cat({r, z, n, host(hx).to(n.scalar_type()), h[2]}, 1).to(dtype);
  note("launch", "aten::_thnn_fused_gru_cell", {of_input, of_hidden, hx}, {out, kept});
  return {device(out), device(kept)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad, const Tensor& kept, bool has_bias) {
  auto dtype = kept.scalar_type(), wide = dtype == kDouble ? kDouble : kFloat;
  auto parts = host(kept).to(wide).chunk(5, 1);
  auto r = parts[0], z = parts[1], n = parts[2], dy = host(grad).to(wide);
  auto dn = dy * (1 - z) * (1 - n * n), dz = dy * (parts[3] - n) * z * (1 - z);
  auto dr = dn * parts[4] * r * (1 - r);
  auto of_input = at::cat({dr, dz, dn}, 1), of_hidden = at::cat({dr, dz, dn * r}, 1);
  note("launch", "aten::_thnn_fused_gru_cell_backward", {grad, kept}, {of_input, of_hidden});
  auto bias = [&](const Tensor& t) { return has_bias ? device(t.sum(0).to(dtype)) : Tensor(); };
  return {device(of_input.to(dtype)), device(of_hidden.to(dtype)), device((dy * z).to(dtype)),
          bias(of_input), bias(of_hidden)};
}
